#!/usr/bin/env python3
"""Tests of what is read from programs' reports."""
import json
import unittest

import report
from samples import BENCHMARK, GTEST


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

    def test_the_mean_is_left_out_where_there_is_a_median(self):
        text = BENCHMARK.replace('"of_plain"', '"ms"')
        self.assertEqual(report.benchmarks(text)[0]["figures"], {"ms": 1.01, "reserved_of_plan": 0.9})

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

    def test_what_a_test_said_that_died(self):
        said = ("[==========] Running 3 tests\n[ RUN      ] A.Good\n[       OK ] A.Good (3 ms)\n[ RUN      ] A.Bad\n"
                "x.cc:3: Failure\n[  FAILED  ] A.Bad (1 ms)\n[ RUN      ] A.Hangs\nhalf-way\n")
        found = report.test_cases_of_output(said)
        self.assertEqual([(case["name"], case["outcome"]) for case in found],
                         [("A.Good", "passed"), ("A.Bad", "failed"), ("A.Hangs", "failed")])
        self.assertEqual([case["message"] for case in found], ["", "x.cc:3: Failure", "half-way\nhas not ended"])
        self.assertEqual(report.test_cases_of_output("Segmentation fault"), [])

    def test_what_a_peer_said(self):
        said = 'a warning\n{"impl": "fsdp2", "bf16": false, "step_ms": 200.5, "params": 9}\n'
        self.assertEqual(report.peer_cases(said, "FSDP2"), [
            {"name": "FSDP2", "outcome": "passed", "message": "", "figures": {"step_ms": 200.5, "params": 9}}])
        with self.assertRaises(IndexError):
            report.peer_cases("Traceback", "FSDP2")


if __name__ == "__main__":
    unittest.main()
