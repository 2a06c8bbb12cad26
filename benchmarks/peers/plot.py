"""Bars of step times and memory as SVG: one row of panels per shape, floor to the fastest peer in one look."""
import dataclasses
import typing
from xml.sax import saxutils

WIDTH = 960
LABELS = 196  # the names left of the bars
STEP_PANEL = (LABELS, 400)  # left edge, width
MEMORY_PANEL = (650, 220)
TOP = 84
BAR, PITCH = 20, 30
TITLE_HEIGHT, GAP = 34, 26
INK, FAINT, GRID = "#1f2933", "#5f6c7b", "#d9e0e8"


@dataclasses.dataclass(frozen=True)
class Bar:
    label: str
    color: str
    bold: bool = False
    step: typing.Optional[typing.Tuple[float, float, float]] = None  # median, least, largest; ms
    memory: typing.Optional[float] = None  # MB


@dataclasses.dataclass(frozen=True)
class Row:
    """Of panels."""
    title: str
    bars: typing.List[Bar]
    floor: typing.Optional[float] = None  # ms


def _text(x, y, text, size=12, color=INK, anchor="start", bold=False):
    weight = ' font-weight="bold"' if bold else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{saxutils.escape(text)}</text>")


def _line(x1, y1, x2, y2, color, width=1.0, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
            f'stroke-width="{width}"{dashes}/>')


def ticks(largest, count=4):
    """Round numbers from 0 to at least `largest`, about `count` steps."""
    step = 1.0
    while step * count < largest:
        step *= 10
    for part in (10, 5, 4, 2):
        if step / part * count >= largest:
            step /= part
            break
    values = [0.0]
    while values[-1] < largest:
        values.append(values[-1] + step)
    return values


def _number(value):
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


class _Panel:
    """Bars from a common zero, values right of them."""

    def __init__(self, place, top, height, title, unit, largest):
        self.left, self.width = place
        self.top, self.bottom = top, top + height
        self.marks = ticks(largest)
        self.out = [_text(self.left, top - 12, f"{title}, {unit}", bold=True)]
        for mark in self.marks:
            x = self.x(mark)
            self.out.append(_line(x, top - 4, x, self.bottom, GRID))
            self.out.append(_text(x, self.bottom + 13, _number(mark), 10, FAINT, "middle"))

    def x(self, value):
        return self.left + self.width * value / self.marks[-1]

    def add(self, index, bar, value, spread=None):
        y = self.top + index * PITCH + (PITCH - BAR) / 2
        middle = y + BAR / 2
        end = self.x(value)
        self.out.append(f'<rect x="{self.left}" y="{y:.1f}" width="{end - self.left:.1f}" height="{BAR}" rx="2" '
                        f'fill="{bar.color}"/>')
        if spread and spread[1] > spread[0]:
            low, high = map(self.x, spread)
            # White below, to be seen on dark bars.
            for color, width in (("#ffffff", 3.6), (INK, 1.4)):
                self.out += [_line(low, middle, high, middle, color, width),
                             _line(low, middle - 4, low, middle + 4, color, width),
                             _line(high, middle - 4, high, middle + 4, color, width)]
            end = max(end, high)
        self.out.append(f'<rect x="{end + 4:.1f}" y="{middle - 8:.1f}" width="{7 * len(_number(value)) + 4}" '
                        'height="16" fill="#ffffff" fill-opacity="0.85"/>')
        self.out.append(_text(end + 6, middle + 4, _number(value), 12, INK, bold=bar.bold))


def _draw_row(row, top):
    height = len(row.bars) * PITCH
    out = []
    steps = [bar.step for bar in row.bars if bar.step]
    memory = [bar.memory for bar in row.bars if bar.memory]
    for index, bar in enumerate(row.bars):
        out.append(_text(LABELS - 10, top + index * PITCH + PITCH / 2 + 4, bar.label, 12, INK, "end", bar.bold))
    if steps:
        panel = _Panel(STEP_PANEL, top, height, f"Step, {row.title}", "ms", max(step[2] for step in steps))
        for index, bar in enumerate(row.bars):
            if bar.step:
                panel.add(index, bar, bar.step[0], bar.step[1:])
        if row.floor:
            x = panel.x(row.floor)
            panel.out.append(_line(x, top - 4, x, panel.bottom, FAINT, 1.2, "4 3"))
        out += panel.out
    if memory:
        panel = _Panel(MEMORY_PANEL, top, height, "Memory of a rank (PSS)", "MB", max(memory))
        for index, bar in enumerate(row.bars):
            if bar.memory:
                panel.add(index, bar, bar.memory)
        out += panel.out
    return out


def draw(title, subtitles, rows):
    """An SVG document. `rows`: of at least one bar each."""
    top = TOP + TITLE_HEIGHT - 10
    out = []
    for row in rows:
        out += _draw_row(row, top)
        top += len(row.bars) * PITCH + TITLE_HEIGHT + GAP
    height = top - GAP
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="DejaVu Sans, Verdana, sans-serif">',
        f"<title>{saxutils.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(20, 30, title, 17, bold=True),
        *[_text(20, 50 + 17 * index, subtitle, 11.5, FAINT) for index, subtitle in enumerate(subtitles)],
    ]
    return "\n".join(head + out + ["</svg>"]) + "\n"
