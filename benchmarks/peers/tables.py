"""Tables in Markdown, and documents in which they are replaced."""


def milliseconds(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_spread(summary, form, unit=""):
    """"134 ms (131-140)"; "" for None."""
    if summary is None:
        return ""
    text = f"{form(summary.median)} {unit}".rstrip()
    if len(summary.values) > 1:
        text += f" ({form(summary.least)}-{form(summary.largest)})"
    return text


def markdown(rows, aligned=False):
    """`rows`: the header first. Aligned, for terminals, or as documents have it."""
    widths = [max(len(row[column]) for row in rows) if aligned else 0 for column in range(len(rows[0]))]

    def line(row):
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"

    separator = "|" + "|".join("-" * (width + 2 if aligned else 3) for width in widths) + "|"
    return "\n".join([line(rows[0]), separator, *map(line, rows[1:])])


def markers(name):
    return f"<!-- {name}:begin, written by //benchmarks:peers -->", f"<!-- {name}:end -->"


def replace_between(text, name, content):
    """`text` with `content` between its two marker lines. Raises ValueError where these are not once each, in order."""
    begin, end = markers(name)
    lines = text.split("\n")
    if lines.count(begin) != 1 or lines.count(end) != 1 or lines.index(begin) > lines.index(end):
        raise ValueError(f"expected one line '{begin}' and after it one line '{end}'")
    return "\n".join([*lines[:lines.index(begin) + 1], content.strip("\n"), *lines[lines.index(end):]])
