"""What was measured as tables, JSON, CSV and a plot."""
import csv
import io
import json

import machine
import plot
import summary
import tables

COLORS = {"ours": "#2563a8", "ours_gloo": "#8db8e0", "floor": "#aab4bf"}
PEER_COLOR = "#e0a05a"


def of_rounds(rounds, where):
    return "One round" if rounds == 1 else f"Medians of {rounds} rounds, {where} the least and the largest"


def step_summary(measured, contender, shape):
    return summary.summarize(measured.steps.get((contender, shape), ()))


def ratio_summary(measured, ratio, shape):
    """None where a side was not measured."""
    sides = []
    for key in (ratio.numerator, ratio.denominator):
        if ratio.of_memory:
            peak = measured.peaks.get((key, shape))
            sides.append([peak.pss] if peak else None)
        else:
            sides.append(measured.steps.get((key, shape)))
    return summary.paired_ratio(*sides, scale=ratio.scale)


def ranks_of(measured):
    return min(contender.ranks for contender in measured.contenders)


def contender_rows(measured):
    head = [f"{ranks_of(measured)} ranks, 1 thread each"]
    for shape in measured.shapes:
        head += [f"step, {shape.title}", "memory (PSS)", "RSS"]
    rows = [head]
    for contender in measured.contenders:
        row = [f"**{contender.title}**" if contender.key == "ours" else contender.title]
        for shape in measured.shapes:
            peak = measured.peaks.get((contender.key, shape.key))
            row.append(tables.with_spread(step_summary(measured, contender.key, shape.key), tables.milliseconds, "ms"))
            row += [f"{value / 1e6:,.0f} MB" for value in (peak.pss, peak.rss)] if peak else ["", ""]
        rows.append(row)
    kept = [column for column in range(len(head)) if any(row[column] for row in rows[1:])]
    return [[row[column] for column in kept] for row in rows]


def ratio_rows(measured):
    head = ["ratio"]
    for shape in measured.shapes:
        head += [shape.title, "target"]
    rows = [head]
    for ratio in summary.RATIOS:
        found = [ratio_summary(measured, ratio, shape.key) for shape in measured.shapes]
        if not any(found):
            continue
        row = [ratio.title]
        for shape, value in zip(measured.shapes, found):
            target = ratio.targets.get(shape.key)
            verdict = "" if target is None or value is None else " yes" if target.holds(value.median) else " **no**"
            row += [tables.with_spread(value, "{:.2f}".format), f"{target}{verdict}" if target else ""]
        rows.append(row)
    return rows


def train_text(measured, described, rounds, aligned=False):
    """Both tables, with what they are of."""
    first = f"{machine.sentence(described)}. {of_rounds(rounds, 'in brackets')}."
    parts = [first, tables.markdown(contender_rows(measured), aligned)]
    ratios = ratio_rows(measured)
    if len(ratios) > 1:
        parts.append(tables.markdown(ratios, aligned))
    return "\n\n".join(parts)


def plot_text(measured, described, rounds):
    rows = []
    for shape in measured.shapes:
        bars = []
        for contender in measured.contenders:
            if contender.key == "ours_twice":  # its step is twice the work
                continue
            step = step_summary(measured, contender.key, shape.key)
            peak = measured.peaks.get((contender.key, shape.key))
            bars.append(plot.Bar(contender.title.split(":")[0], COLORS.get(contender.key, PEER_COLOR),
                                 contender.key == "ours", step and (step.median, step.least, step.largest),
                                 peak and peak.pss / 1e6))
        floor = step_summary(measured, "floor", shape.key)
        rows.append(plot.Row(shape.title, bars, floor and floor.median))
    return plot.draw(
        f"One step of a GPT of {min(measured.params.values()) / 1e6:.1f} million parameters, {ranks_of(measured)} ranks",
        [machine.sentence(described), f"{of_rounds(rounds, 'black lines:')}. Dashed: the floor, models that are not "
         "sharded and do not communicate."], rows)


def as_json(measured, described, rounds):
    entries = []
    for contender in measured.contenders:
        for shape in measured.shapes:
            key = (contender.key, shape.key)
            peak = measured.peaks.get(key)
            entries.append({
                "contender": contender.key, "batch": shape.batch, "seq": shape.seq, "ranks": contender.ranks,
                "params": measured.params.get(shape.key), "steps": shape.steps, "warmup": shape.warmup,
                "step_ms": measured.steps.get(key, []),
                "pss_bytes": peak and round(peak.pss), "rss_bytes": peak and peak.rss,
                "losses": measured.losses.get(key, []),
            })
    ratios = []
    for ratio in summary.RATIOS:
        for shape in measured.shapes:
            value, target = ratio_summary(measured, ratio, shape.key), ratio.targets.get(shape.key)
            if value:
                ratios.append({"ratio": ratio.title, "batch": shape.batch, "seq": shape.seq, "median": value.median,
                               "least": value.least, "largest": value.largest, "rounds": list(value.values),
                               "target": target and str(target), "holds": target and target.holds(value.median)})
    return json.dumps({"machine": described, "rounds": rounds, "contenders": entries,
                       "ratios": ratios}, indent=1) + "\n"


def as_csv(measured):
    """One line per run that was timed, one per peak of memory."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["contender", "batch", "seq", "ranks", "round", "step_ms", "pss_bytes", "rss_bytes"])
    for contender in measured.contenders:
        for shape in measured.shapes:
            first = [contender.key, shape.batch, shape.seq, contender.ranks]
            for number, value in enumerate(measured.steps.get((contender.key, shape.key), []), start=1):
                writer.writerow([*first, number, round(value, 3), "", ""])
            peak = measured.peaks.get((contender.key, shape.key))
            if peak:
                writer.writerow([*first, "", "", round(peak.pss), peak.rss])
    return out.getvalue()
