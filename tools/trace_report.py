#!/usr/bin/env python3
"""Says where the time of training steps has gone that fsdp::Trace (fsdp/trace/trace.h) has recorded.

  ./bazelw run //tools:trace_report -- --csv=sums.csv trace.json

Every moment belongs to the innermost span over it; the user's spans and bookkeeping yield to the spans inside them. It is
spent on the category of its span, for the user's spans on their own name. Where there is no span, for example in the
loss, it is spent on "other".
"""
import argparse
import bisect
import collections
import csv
import itertools
import json
import os
import sys
import typing

# The categories of fsdp/trace/trace_timeline.h, in the order of the report.
COMPUTE = ("forward", "recompute", "backward")
WAITS = ("gather wait", "reduce wait", "fence", "agreement")
OWN = COMPUTE + WAITS + ("copy", "start", "free", "optimizer")
AROUND = ("bookkeeping", "user")  # A moment belongs to them where none of OWN is open.
CATEGORIES = OWN + AROUND + ("phase", "step", "gathering", "reducing")
OTHER = "other"


class Failure(Exception):
    """A text for the user."""


class Span(typing.NamedTuple):
    begin: int  # nanoseconds, by one clock for all ranks of a file
    end: int
    category: str
    name: str
    unit: str = ""  # empty: belongs to none
    bytes: int = 0
    step: int = 0  # its number, for "step"


class Step(typing.NamedTuple):
    """One step of one rank; times are in nanoseconds."""
    rank: int
    number: int
    begin: int
    end: int
    times: typing.Dict[str, int]  # by kind: sums up to end - begin
    units: typing.Dict[str, typing.Dict[str, int]]  # by unit: the part that belongs to units
    gathered: typing.Dict[str, int]  # bytes, by unit

    def of(self, kinds):
        return sum(self.times[kind] for kind in kinds)


def is_number(value):
    return isinstance(value, (int, float))


class Reader:
    """Reads files of one run: the spans and the number of dropped ones of each rank."""

    def __init__(self):
        self.spans, self.dropped, self.first_base = {}, {}, None

    def read(self, text):
        try:
            trace = json.loads(text)
        except ValueError as error:
            raise Failure(f"{error}. Was the file written to its end?") from error
        events = trace.get("traceEvents") if isinstance(trace, dict) else None
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise Failure('there is no array "traceEvents" of objects: this is no trace')
        # Spans may precede the event that says from where their times count.
        shifts = dict(self.read_header(event) for event in events if event.get("name") == "fsdp_trace")
        if not shifts:
            raise Failure('there is no event "fsdp_trace": this trace is not one of fsdp::Trace')
        for index, event in enumerate(events):
            try:
                self.read_span(event, shifts)
            except Failure as failure:
                raise Failure(f"event {index}: {failure}") from failure

    def read_header(self, event):
        """The rank, and the nanoseconds from the first file's base to where its times begin."""
        args = event.get("args", {})
        try:
            rank, base = int(event["pid"]), int(args["base_ns"])
        except (KeyError, TypeError, ValueError):
            rank = -1
        if rank < 0:
            raise Failure('the event "fsdp_trace" is damaged: it has a "pid" and, in "args", "base_ns"')
        version = args.get("version", 0)
        if version != 1:
            raise Failure(f"the trace has version {version}, this program knows 1: use that of the same source")
        if rank in self.spans:
            raise Failure(f"rank {rank} is there twice: give the files of one run, each of them once")
        if self.first_base is None:
            self.first_base = base
        self.spans[rank], self.dropped[rank] = [], args.get("dropped", 0)
        return rank, base - self.first_base

    def read_span(self, event, shifts):
        if "ph" not in event:
            raise Failure('it has no "ph"')
        if event["ph"] != "X":
            return
        name, category, rank, begin, length = (event.get(key) for key in ("name", "cat", "pid", "ts", "dur"))
        if None in (name, category, rank) or not is_number(begin) or not is_number(length):
            raise Failure('it lacks one of "name", "cat", "pid", "ts" and "dur"')
        if category not in CATEGORIES:
            raise Failure(f'unknown category "{category}"')
        if rank not in shifts:
            raise Failure(f'its rank {rank} has no event "fsdp_trace" in this file')
        if length < 0:
            raise Failure("it ends before it begins")
        args = event.get("args", {})
        # Whole nanoseconds make spans that touch do so exactly.
        begin_ns = shifts[rank] + round(begin * 1e3)
        self.spans[rank].append(Span(begin_ns, begin_ns + round(length * 1e3), category, name, args.get("unit", ""),
                                     args.get("bytes", 0), args.get("step", 0)))


def read_traces(files):
    """({rank: spans by begin, outer ones first}, {rank: the number of dropped spans}), ranks ascending, of files' paths
    and texts. Times count from the first file's base."""
    reader = Reader()
    for path, text in files:
        try:
            reader.read(text)
        except Failure as failure:
            raise Failure(f"trace {path}: {failure}") from failure
    for rank, spans in sorted(reader.spans.items()):
        if not any(span.category == "step" for span in spans):
            raise Failure(f"the trace of rank {rank} has no step that it holds from beginning to end: mark steps by "
                          "fsdp::TraceStep" + (", and raise TraceOptions::capacity" if reader.dropped[rank] else ""))
        spans.sort(key=lambda span: (span.begin, -span.end))
    return dict(sorted(reader.spans.items())), reader.dropped


def slices_of(spans):
    """[(begin, end, kind, unit)], ascending, without the times that belong to no span."""
    edges = []
    for index, span in enumerate(spans):
        if span.category in OWN + AROUND:
            key = span.category in OWN, index  # A moment belongs to the greatest open one.
            edges += [(span.begin, True, key), (span.end, False, key)]
    slices, open_spans, now = [], set(), None
    for time, begins, key in sorted(edges, key=lambda edge: edge[0]):
        if open_spans and time > now:
            span = spans[max(open_spans)[1]]
            slices.append((now, time, span.name if span.category == "user" else span.category, span.unit))
        now = time
        (open_spans.add if begins else open_spans.remove)(key)
    return slices


def break_down(traces):
    """A Step for each step of each rank; what a trace has twice is there twice."""
    steps = []
    for rank, spans in traces.items():
        slices = slices_of(spans)
        ends = [end for _, end, _, _ in slices]
        gathered = [span for span in spans if span.category == "gathering"]
        starts = [span.begin for span in gathered]
        for step in (span for span in spans if span.category == "step"):
            times, units = collections.Counter(), collections.defaultdict(collections.Counter)
            for begin, end, kind, unit in itertools.islice(slices, bisect.bisect_right(ends, step.begin), None):
                if begin >= step.end:
                    break
                nanoseconds = min(end, step.end) - max(begin, step.begin)
                times[kind] += nanoseconds
                if unit:
                    units[unit][kind] += nanoseconds
            rest = step.end - step.begin - sum(times.values())
            if rest > 0:
                times[OTHER] += rest
            gathers = collections.Counter()
            for span in gathered[bisect.bisect_left(starts, step.begin):bisect.bisect_left(starts, step.end)]:
                gathers[span.unit] += span.bytes
            steps.append(Step(rank, step.step, step.begin, step.end, times, units, gathers))
    return steps


def kinds_of(steps):
    """All that any step has spent time on: the library's categories in their order, the user's names, OTHER."""
    seen = {kind for step in steps for kind in step.times}
    kinds = [kind for kind in CATEGORIES if kind in seen]
    return kinds + sorted(seen.difference(kinds, {OTHER})) + [OTHER] * (OTHER in seen)


def milliseconds(nanoseconds):
    return f"{nanoseconds / 1e6:.2f}"


def mean(steps, value_of):
    return sum(map(value_of, steps)) / len(steps)


def percent(part, whole):
    return 100 * part / whole if whole else 0


def table(title, rows):
    """Columns as wide as needed: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0])] + list(map(str.rjust, row[1:], widths[1:]))) for row in rows]
    return "\n".join(["", title] + lines) + "\n"


def plural(count, noun):
    return f"{count} {noun}" + "s" * (count != 1)


def to_text(steps, dropped):
    """Tables of steps, ranks and units, and how far ranks are apart."""
    kinds, seen = kinds_of(steps), collections.Counter()
    by_rank, by_step = collections.defaultdict(list), collections.defaultdict(list)
    for step in steps:
        by_rank[step.rank].append(step)
        by_step[seen[step.rank, step.number], step.number].append(step)
        seen[step.rank, step.number] += 1

    def row(first, of):
        return [str(first), milliseconds(mean(of, lambda step: step.end - step.begin))] + [
            milliseconds(mean(of, lambda step, kind=kind: step.times[kind])) for kind in kinds]

    text = f"{plural(len(by_step), 'step')} of {plural(len(by_rank), 'rank')}\n"
    for rank in by_rank:
        if dropped[rank]:
            text += (f"rank {rank} dropped its {dropped[rank]} oldest spans: its first step may be incomplete "
                     "(TraceOptions::capacity)\n")
    rows = [row(number, of) for (_, number), of in sorted(by_step.items())]
    text += table("Steps, in ms, mean of the ranks",
                  [["step", "time"] + kinds] + rows + [row("mean", steps)] * (len(rows) > 1))
    exposed = mean(steps, lambda step: step.of(WAITS))
    text += (f"\nExposed communication: {milliseconds(exposed)} ms a step, "
             f"{percent(exposed, mean(steps, lambda step: step.end - step.begin)):.1f} % of it")
    waits = [(kind, mean(steps, lambda step, kind=kind: step.times[kind])) for kind in WAITS]
    parts = ", ".join(f"{kind} {milliseconds(time)}" for kind, time in waits if time)
    text += f": {parts}" if parts else ""
    starts = mean(steps, lambda step: step.times["start"])
    text += f"; to start collectives takes {milliseconds(starts)} more\n" if starts else "\n"
    if len(by_rank) > 1:
        computing = {rank: mean(of, lambda step: step.of(COMPUTE)) for rank, of in by_rank.items()}
        slowest = max(computing, key=computing.get)
        average = mean(steps, lambda step: step.of(COMPUTE))
        begins = [[step.begin for step in of] for of in by_step.values()]
        skew = max(max(times) - min(times) for times in begins)
        text += table("Ranks, in ms a step",
                      [["rank", "time"] + kinds] + [row(rank, of) for rank, of in by_rank.items()])
        text += (f"rank {slowest} computes longest, {percent(computing[slowest] - average, average):.1f} % above the mean; "
                 f"ranks begin a step up to {milliseconds(skew)} ms apart\n")
    units = list(dict.fromkeys(unit for step in steps for unit in sorted(step.units)))
    if units:
        seen_in_units = {kind for step in steps for times in step.units.values() for kind in times}
        of_units = [kind for kind in kinds if kind in seen_in_units]
        rows = [[unit] + [milliseconds(mean(steps, lambda step, unit=unit, kind=kind: step.units[unit][kind]
                                            if unit in step.units else 0)) for kind in of_units] +
                [f"{mean(steps, lambda step, unit=unit: step.gathered[unit]) / 1e6:.2f}"] for unit in units]
        text += table("Units, in ms a step, mean of the ranks", [["unit"] + of_units + ["gathered MB"]] + rows)
    return text


def write_csv(steps, file):
    """A line per step, rank, unit and kind of time, in milliseconds. Lines without a unit are sums over all units; their
    kind "step" is the whole step."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["step", "rank", "unit", "kind", "ms"])
    for step in steps:
        lines = [("", "step", step.end - step.begin)]
        for unit, times in [("", step.times)] + sorted(step.units.items()):
            lines += [(unit, kind, time) for kind, time in sorted(times.items())]
        writer.writerows([step.number, step.rank, unit, kind, f"{time / 1e6:.6f}"] for unit, kind, time in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="FILE", help="write all sums to this file")
    parser.add_argument("traces", nargs="+", metavar="TRACE",
                        help="a file that --trace, fsdp::WriteTrace() or Trace::Write() wrote; all are of one run")
    flags = parser.parse_args()
    folder = os.environ.get("BUILD_WORKING_DIRECTORY", "")  # where `bazel run` was called
    try:
        files = []
        for path in flags.traces:
            with open(os.path.join(folder, path), encoding="utf-8", errors="replace") as file:
                files.append((path, file.read()))
        traces, dropped = read_traces(files)
        steps = break_down(traces)
        print(to_text(steps, dropped), end="", flush=True)
        if flags.csv:
            with open(os.path.join(folder, flags.csv), "w", encoding="utf-8") as file:
                write_csv(steps, file)
    except (Failure, OSError) as error:
        sys.exit(f"trace_report: {error}")


if __name__ == "__main__":
    main()
