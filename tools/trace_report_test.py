#!/usr/bin/env python3
"""Tests of trace_report.py."""
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest

import trace_report
from trace_report import Span

MS = 1_000_000


def header(rank, base_ns=0, dropped=0):
    return {"ph": "M", "name": "fsdp_trace", "pid": rank, "tid": 0,
            "args": {"version": 1, "base_ns": str(base_ns), "dropped": dropped}}


def events_of(rank, base_ns=0, begin_us=0, dropped=0):
    """A step of a millisecond with a forward inside, as the library writes them."""
    return [
        header(rank, base_ns, dropped), {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": "x"}},
        {"ph": "X", "name": "step 7", "cat": "step", "pid": rank, "ts": begin_us, "dur": 1000, "args": {"step": 7}},
        {"ph": "X", "name": "forward a", "cat": "forward", "pid": rank, "ts": begin_us + 0.1, "dur": 0.101,
         "args": {"unit": "a", "bytes": 12}}, {"ph": "C", "name": "reduce buffers", "pid": rank, "args": {"bytes": 2}}]


def text_of(*events):
    return json.dumps({"traceEvents": sum(events, [])})


class ReaderTest(unittest.TestCase):
    def assert_refused(self, message, *texts):
        with self.assertRaises(trace_report.Failure) as caught:
            trace_report.read_traces([(f"{index}.json", text) for index, text in enumerate(texts)])
        self.assertIn(message, str(caught.exception))

    def test_reads_what_the_library_writes(self):
        traces, dropped = trace_report.read_traces([("x", text_of(events_of(1), events_of(0, 0, 2, 3)))])
        self.assertEqual((list(traces), dropped), ([0, 1], {0: 3, 1: 0}))
        self.assertEqual(traces[0], [Span(2_000, 1_002_000, "step", "step 7", step=7),
                                     Span(2_100, 2_201, "forward", "forward a", "a", 12)])

    def test_times_of_several_files_count_from_the_first_ones_base(self):
        now = 1_700_000_000_000_000_000
        traces, _ = trace_report.read_traces([("a", text_of(events_of(0, now, 1))),
                                              ("b", text_of(events_of(1, now - 3_000_001, 2)))])
        self.assertEqual((traces[0][0].begin, traces[1][0].begin), (1_000, -2_998_001))

    def test_outer_spans_come_first_and_a_header_may_be_last(self):
        events = events_of(0)[::-1]
        events[1]["ts"] = 0
        traces, _ = trace_report.read_traces([("x", text_of(events))])
        self.assertEqual(traces[0][0].name, "step 7")

    def test_refuses_what_is_no_trace(self):
        whole = text_of(events_of(0))
        for length in (0, 1, len(whole) // 2):
            self.assert_refused("Was the file written to its end?", whole[:length])
        for text in ("[]", "{}", "3", '{"traceEvents": 3}', '{"traceEvents": [3]}'):
            self.assert_refused("trace 0.json: there is no array", text)
        for text in ('{"traceEvents": []}', '{"traceEvents": [{"ph":"M","name":"x"}]}'):
            self.assert_refused("not one of fsdp::Trace", text)

    def test_refuses_damaged_events_by_their_number(self):
        whole = text_of(events_of(0))
        for good, bad, message in (
                ('"base_ns": "0"', '"base_ns": "x"', "is damaged"), ('"base_ns": "0"', '"base": "0"', "is damaged"),
                ('"version": 1', '"version": 2', "has version 2"),
                ('"dur": 0.101', '"duration": 0.101', "event 3: it lacks"),
                ('"dur": 0.101', '"dur": "0.101"', "event 3: it lacks"),
                ('"dur": 0.101', '"dur": -0.101', "event 3: it ends before it begins"),
                ('"cat": "forward"', '"cat": "sideways"', 'event 3: unknown category "sideways"'),
                ('"cat": "forward", "pid": 0', '"cat": "forward", "pid": 4', "event 3: its rank 4 has no event"),
                ('"ph": "X", "name": "forward a"', '"name": "forward a"', 'event 3: it has no "ph"')):
            self.assertIn(good, whole)
            self.assert_refused(message, whole.replace(good, bad))

    def test_refuses_a_rank_that_is_there_twice_and_one_without_steps(self):
        one = text_of(events_of(2))
        self.assert_refused("trace 1.json: rank 2 is there twice", one, one)
        self.assert_refused("rank 2 is there twice", text_of(events_of(2), events_of(2)))
        self.assert_refused("rank 3 has no step", text_of([header(3)]))
        self.assert_refused("by fsdp::TraceStep, and raise TraceOptions::capacity", text_of([header(3, dropped=4)]))


def two_ranks():
    """Two ranks and two steps; every number below can be added up by hand."""
    traces = {}
    for rank in (0, 1):
        spans = traces.setdefault(rank, [])
        for step in (1, 2):
            for category, name, unit, begin, end in (
                    ("step", "", "", 0, 100), ("phase", "forward of root", "root", 0, 80), ("user", "data", "", 0, 4),
                    ("fence", "OpenShards a", "a", 4, 6), ("gathering", "", "a", 6, 16), ("start", "Gather", "a", 6, 8),
                    ("bookkeeping", "PreForward", "a", 7, 18), ("gather wait", "WaitGather a", "a", 8, 16),
                    ("forward", "forward a", "a", 18, 36 + 2 * rank), ("backward", "backward a", "a", 40, 70),
                    ("free", "Free a", "a", 75, 75), ("reduce wait", "WaitReduce b", "b", 75, 80),
                    ("optimizer", "Step a", "a", 80, 82), ("user", "optimizer", "", 82, 90),
                    ("agreement", "CheckOrder", "a", 90, 91)):
                moved = 4_000_000 if category == "gathering" else 0
                begin, end = (MS * (200 * step + rank + at) for at in (begin, end))
                spans.append(Span(begin, end, category, name, unit, moved, step))
    return traces


class ReportTest(unittest.TestCase):
    def test_every_moment_belongs_to_the_innermost_span(self):
        self.assertEqual(trace_report.slices_of([]), [])
        spans = [Span(0, 20, "step", ""), Span(1, 9, "bookkeeping", "PreForward a", "a"),
                 Span(2, 5, "gathering", "", "a"), Span(2, 3, "start", "", "a"), Span(4, 5, "gather wait", "", "a"),
                 Span(9, 15, "forward", "", "a"), Span(17, 17, "free", "", "a")]
        self.assertEqual(trace_report.slices_of(spans), [
            (1, 2, "bookkeeping", "a"), (2, 3, "start", "a"), (3, 4, "bookkeeping", "a"), (4, 5, "gather wait", "a"),
            (5, 9, "bookkeeping", "a"), (9, 15, "forward", "a")])

    def test_the_users_spans_have_what_is_left_of_them(self):
        spans = [Span(0, 10, "user", "loss"), Span(1, 4, "forward", "", "a"), Span(2, 8, "user", "attention"),
                 Span(4, 6, "bookkeeping", "", "b"), Span(6, 7, "forward", "", "b")]
        self.assertEqual(trace_report.slices_of(spans), [
            (0, 1, "loss", ""), (1, 2, "forward", "a"), (2, 4, "forward", "a"), (4, 6, "bookkeeping", "b"),
            (6, 7, "forward", "b"), (7, 8, "attention", ""), (8, 10, "loss", "")])

    def test_sums_are_those_added_up_by_hand(self):
        steps = trace_report.break_down(two_ranks())
        self.assertEqual([(step.rank, step.number) for step in steps], [(0, 1), (0, 2), (1, 1), (1, 2)])
        for step in steps:
            own = {"fence": 2, "start": 2, "gather wait": 8, "bookkeeping": 2, "forward": 18 + 2 * step.rank,
                   "backward": 30, "agreement": 1}
            self.assertEqual(step.times, {kind: MS * time for kind, time in (
                {**own, "data": 4, "reduce wait": 5, "optimizer": 10, "other": 18 - 2 * step.rank}).items()})
            # Data, the user's optimizer and the rest belong to no unit.
            self.assertEqual(step.units["a"], {kind: MS * time for kind, time in {**own, "optimizer": 2}.items()})
            self.assertEqual(step.gathered, {"a": 4_000_000})

    def test_adds_up_steps_ranks_and_units(self):
        self.assertEqual(trace_report.to_text(trace_report.break_down(two_ranks()), {0: 0, 1: 17}), """\
2 steps of 2 ranks
rank 1 dropped its 17 oldest spans: its first step may be incomplete (TraceOptions::capacity)

Steps, in ms, mean of the ranks
step    time  forward  backward  gather wait  reduce wait  fence  agreement  start  optimizer  bookkeeping  data  other
1     100.00    19.00     30.00         8.00         5.00   2.00       1.00   2.00      10.00         2.00  4.00  17.00
2     100.00    19.00     30.00         8.00         5.00   2.00       1.00   2.00      10.00         2.00  4.00  17.00
mean  100.00    19.00     30.00         8.00         5.00   2.00       1.00   2.00      10.00         2.00  4.00  17.00

Exposed communication: 16.00 ms a step, 16.0 % of it: gather wait 8.00, reduce wait 5.00, fence 2.00, agreement 1.00; \
to start collectives takes 2.00 more

Ranks, in ms a step
rank    time  forward  backward  gather wait  reduce wait  fence  agreement  start  optimizer  bookkeeping  data  other
0     100.00    18.00     30.00         8.00         5.00   2.00       1.00   2.00      10.00         2.00  4.00  18.00
1     100.00    20.00     30.00         8.00         5.00   2.00       1.00   2.00      10.00         2.00  4.00  16.00
rank 1 computes longest, 2.0 % above the mean; ranks begin a step up to 1.00 ms apart

Units, in ms a step, mean of the ranks
unit  forward  backward  gather wait  reduce wait  fence  agreement  start  optimizer  bookkeeping  gathered MB
a       19.00     30.00         8.00         0.00   2.00       1.00   2.00       2.00         2.00         4.00
b        0.00      0.00         0.00         5.00   0.00       0.00   0.00       0.00         0.00         0.00
""")

    def test_steps_without_units_have_no_table_of_them(self):
        steps = trace_report.break_down({0: [Span(0, 500 * MS, "step", "", step=3), Span(0, 250 * MS, "user", "data")]})
        self.assertEqual(trace_report.to_text(steps, {0: 0}), """\
1 step of 1 rank

Steps, in ms, mean of the ranks
step    time    data   other
3     500.00  250.00  250.00

Exposed communication: 0.00 ms a step, 0.0 % of it
""")

    def test_csv_has_a_line_for_every_sum(self):
        file = io.StringIO()
        trace_report.write_csv(trace_report.break_down({2: [
            Span(0, 9 * MS, "step", "", step=1), Span(0, 5 * MS, "forward", "", "a"),
            Span(5 * MS, 6 * MS, "user", 'a, "b"')]}), file)
        self.assertEqual(file.getvalue(), '''\
step,rank,unit,kind,ms
1,2,,step,9.000000
1,2,,"a, ""b""",1.000000
1,2,,forward,5.000000
1,2,,other,3.000000
1,2,a,forward,5.000000
''')


class ProgramTest(unittest.TestCase):
    def run_in(self, folder, *args):
        program = os.path.join(os.path.dirname(os.path.realpath(trace_report.__file__)), "trace_report.py")
        return subprocess.run([sys.executable, program, *args], env={**os.environ, "BUILD_WORKING_DIRECTORY": folder},
                              capture_output=True, text=True, check=False)

    def test_reads_files_and_names_those_it_cannot(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "trace.json"), "w", encoding="utf-8") as file:
                file.write(text_of(events_of(0)))
            done = self.run_in(folder, "--csv=sums.csv", "trace.json")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("1 step of 1 rank\n", done.stdout)
            with open(os.path.join(folder, "sums.csv"), encoding="utf-8") as file:
                self.assertIn("7,0,,step,1.000000\n", file.read())
            for path in ("missing", "."):
                done = self.run_in(folder, "trace.json", path)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertIn(os.path.join(folder, path), done.stderr)


if __name__ == "__main__":
    unittest.main()
