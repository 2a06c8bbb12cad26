#!/usr/bin/env python3
"""Tests of what is read from programs' reports and of the Markdown."""
import json
import unittest

import report

GTEST = json.dumps({"testsuites": [{"name": "CudaTest", "testsuite": [
    {"name": "Runs", "status": "RUN", "result": "COMPLETED"},
    {"name": "Breaks", "status": "RUN", "result": "COMPLETED", "failures": [{"failure": "x.cc:3\nExpected: 1"}]},
    {"name": "Skips", "status": "RUN", "result": "SKIPPED"},
]}]})
BENCHMARK = json.dumps({"context": {}, "benchmarks": [
    {"name": "train_step/bf16/iterations:20/manual_time", "run_name": "x", "run_type": "iteration", "iterations": 20,
     "real_time": 100.5, "cpu_time": 3, "time_unit": "ms", "of_plain": 1.01, "reserved_of_plan": 0.9},
    {"name": "offload/stepped_on_host/fp32/iterations:20/manual_time", "run_name": "x", "error_occurred": True,
     "error_message": "RESOURCE_EXHAUSTED: out of memory", "iterations": 0, "real_time": 0, "cpu_time": 0,
     "time_unit": "ms"},
]})


def program(kind, text, **changes):
    cases = report.test_cases(text) if kind == "test" else report.benchmarks(text)
    return {"name": f"a {kind}", "kind": kind, "seconds": 2.4, "exit_code": 0, "cases": cases,
            "outcome": report.outcome_of(cases, 0, False), "output_tail": "last words", **changes}


def results(*programs):
    return {"machine": {"GPU, memory, driver": "H|1", "date": "today"}, "programs": list(programs)}


class ReadingTest(unittest.TestCase):

    def test_cases_of_a_test(self):
        self.assertEqual([(case["name"], case["outcome"]) for case in report.test_cases(GTEST)],
                         [("CudaTest.Runs", "passed"), ("CudaTest.Breaks", "failed"), ("CudaTest.Skips", "skipped")])
        self.assertIn("Expected: 1", report.test_cases(GTEST)[1]["message"])

    def test_figures_of_a_benchmark(self):
        measured, broken = report.benchmarks(BENCHMARK)
        self.assertEqual(measured["name"], "train_step/bf16")
        self.assertEqual(measured["figures"], {"of_plain": 1.01, "reserved_of_plan": 0.9, "time_ms": 100.5})
        self.assertEqual((broken["name"], broken["outcome"]), ("offload/stepped_on_host/fp32", "failed"))
        self.assertIn("out of memory", broken["message"])

    def test_figures_of_a_benchmark_that_was_stopped(self):
        whole = json.dumps(json.loads(BENCHMARK), indent=2)
        self.assertEqual(report.benchmarks(whole), report.benchmarks(BENCHMARK))
        begin = whole.index('"offload/')
        for end in (begin - 20, begin, begin + 30):
            self.assertEqual([case["name"] for case in report.benchmarks(whole[:end])], ["train_step/bf16"])
        for nothing in ("", whole[:20], whole[:whole.index('"train_step')]):
            with self.assertRaises(ValueError):
                report.benchmarks(nothing)

    def test_the_outcome_of_a_program(self):
        passed, failed = [{"outcome": report.PASSED}], [{"outcome": report.PASSED}, {"outcome": report.FAILED}]
        self.assertEqual(report.outcome_of(passed, 0, False), report.PASSED)
        self.assertEqual(report.outcome_of(failed, 0, False), report.FAILED)
        self.assertEqual(report.outcome_of(passed, 1, False), report.FAILED)
        self.assertEqual(report.outcome_of(passed, -9, True), report.TIMED_OUT)
        self.assertEqual(report.outcome_of([], 0, False), report.FAILED, "a program that has run nothing")


class MarkdownTest(unittest.TestCase):

    def test_targets_are_compared_with_what_was_measured(self):
        found = {text: holds for text, _, holds in report.targets(results(program("benchmark", BENCHMARK)))}
        self.assertEqual(found, {"train_step/bf16: of_plain <= 1.02": True,
                                 "train_step/bf16: reserved_of_plan >= 0.98 and <= 1.02": False})

    def test_says_where_what_passed_and_what_was_measured(self):
        text = report.markdown(results(program("test", GTEST), program("benchmark", BENCHMARK)))
        self.assertIn("| GPU, memory, driver | H\\|1 |", text)
        self.assertIn("| a test | failed | 1 | 1 | 1 | 2 s |", text)
        self.assertIn("| benchmark | of_plain | reserved_of_plan | time_ms |", text)
        self.assertIn("| train_step/bf16 | 1.01 | 0.9 | 100.5 |", text)
        self.assertIn("| train_step/bf16: of_plain <= 1.02 | 1.01 | yes |", text)

    def test_failures_come_with_their_texts(self):
        text = report.markdown(results(program("test", GTEST), program("benchmark", BENCHMARK)))
        failures = text[text.index("## What failed"):]
        for part in ("CudaTest.Breaks", "Expected: 1", "offload/stepped_on_host/fp32", "out of memory"):
            self.assertIn(part, failures)
        self.assertNotIn("CudaTest.Runs", failures)

    def test_a_program_that_died_leaves_its_last_words(self):
        dead = program("test", '{"testsuites": []}', outcome=report.TIMED_OUT, exit_code=-9)
        text = report.markdown(results(dead))
        self.assertIn("a test: timed out, exit code -9", text)
        self.assertIn("last words", text)

    def test_nothing_failed(self):
        good = program("test", json.dumps({"testsuites": [{"name": "A", "testsuite": [
            {"name": "B", "status": "RUN", "result": "COMPLETED"}]}]}))
        self.assertNotIn("## What failed", report.markdown(results(good)))

    def test_numbers(self):
        self.assertEqual([report.number(value) for value in (0, 0.98765, 12, 123456.7)],
                         ["0", "0.9877", "12", "123,457"])

    def test_peers_have_a_table_of_their_own(self):
        said = 'a warning\n{"impl": "fsdp2", "bf16": false, "step_ms": 200.5, "params": 9}\n'
        cases = report.peer_cases(said, "FSDP2")
        self.assertEqual(cases[0]["figures"], {"step_ms": 200.5, "params": 9})
        peer = {"name": "FSDP2", "kind": "peer", "seconds": 1, "exit_code": 0, "cases": cases, "outcome": report.PASSED,
                "output_tail": ""}
        self.assertIn("| FSDP2 | 200.5 | 9 |", report.markdown(results(peer)))
        with self.assertRaises(IndexError):
            report.peer_cases("Traceback", "FSDP2")


if __name__ == "__main__":
    unittest.main()
