#!/usr/bin/env python3
"""Tests of the targets, of comparisons and of the report for people."""
import json
import unittest

import markdown
import report
import samples
import targets


def measured(name, **figures):
    return {"name": name, "outcome": report.PASSED, "message": "", "figures": figures}


def program(kind, cases, **changes):
    return {"name": f"a {kind}", "kind": kind, "seconds": 2.4, "exit_code": 0, "cases": cases,
            "outcome": report.outcome_of(cases, 0, False), "output_tail": "last words", **changes}


def results(*programs):
    return {"machine": {"GPU, memory, driver": "H|1", "date": "today"}, "programs": list(programs)}


TESTS = program("test", report.test_cases(samples.GTEST))
BENCHMARKS = program("benchmark", report.benchmarks(samples.BENCHMARK))


def render(*programs, left=()):
    return markdown.render(results(*programs), left)


class TargetsTest(unittest.TestCase):

    def found(self, *programs):
        return {(target.number, target.figure): (value, holds) for target, value, holds
                in targets.check(results(*programs))}

    def test_all_ten_are_there(self):
        self.assertEqual({target.number for target in targets.TARGETS}, set(range(1, 11)))

    def test_are_compared_with_what_was_measured(self):
        found = self.found(BENCHMARKS)
        self.assertEqual(found[1, ("train_step/bf16", "of_plain")], (1.01, targets.HELD))
        self.assertEqual(found[4, ("train_step/bf16", "reserved_of_plan")], (0.9, targets.MISSED))
        self.assertEqual(found[8, ("fused_adamw/fp32", "of_copy")], (None, targets.NOT_MEASURED))

    def test_are_ratios_to_a_peer_of_the_same_run(self):
        ours = program("benchmark", [measured("train_step/bf16", tokens_per_s=1040)])
        key = (1, ("train_step/bf16", "tokens_per_s"))
        self.assertEqual(self.found(ours)[key], (None, targets.NOT_MEASURED))
        for tok_s, holds in ((1000, targets.MISSED), (800, targets.HELD)):
            peer = program("peer", [measured("FSDP2, bf16", tok_s=tok_s)])
            self.assertEqual(self.found(ours, peer)[key], (1040 / tok_s, holds))

    def test_a_larger_step_of_the_peer_is_the_better_for_us(self):
        ours = program("benchmark", [measured("host_cost", ms=2, added_us_per_unit=40)])
        peer = program("peer", [measured("FSDP2, 50 small blocks", step_ms=8)])
        found = self.found(ours, peer)
        self.assertEqual(found[5, ("FSDP2, 50 small blocks", "step_ms")], (4, targets.HELD))
        self.assertEqual(found[5, ("host_cost", "added_us_per_unit")], (40, targets.MISSED))


class MarkdownTest(unittest.TestCase):

    def test_says_where_what_passed_and_what_was_measured(self):
        text = render(TESTS, BENCHMARKS)
        self.assertIn("| GPU, memory, driver | H\\|1 |", text)
        self.assertIn("2 programs ran, 2 of them failed: a test, a benchmark.", text)
        self.assertIn("| a test | failed | 1 | 1 | 1 | 2 s |", text)
        self.assertIn("|  | of_plain | reserved_of_plan | time_ms |", text)
        self.assertIn("| train_step/bf16 | 1.01 | 0.9 | 100.5 |", text)
        self.assertIn("| 1 | GPT of 1B in bf16: step over plain LibTorch's | <= 1.01 | 1.01 | yes |", text)
        self.assertIn("| 10 | full fine-tune of 7B, states in host memory: TFLOPS | >= 272 |  | not measured |", text)

    def test_says_what_is_left(self):
        self.assertIn("`--out`: b, c.", render(TESTS, left=["b", "c"]))
        self.assertNotIn("Not run", render(TESTS))

    def test_ours_stands_beside_pytorch(self):
        ours = program("benchmark", [measured("train_step/bf16", ms=100, tokens_per_s=40960, peak_MB=9000, plain_ms=99,
                                              plain_peak_MB=8900.5)])
        peer = program("peer", [measured("FSDP2, bf16", step_ms=110, tok_s=37236.4, peak_device_mb=9700)])
        text = render(ours, peer)
        table = text[text.index("| GPT of 1B, bf16 |"):]
        self.assertIn("| ours | 100 | 40,960 | 9,000 | 1 |", table)
        self.assertIn("| plain LibTorch | 99 |  | 8,900 | 0.99 |", table)
        self.assertIn("| PyTorch FSDP2 | 110 | 37,236 | 9,700 | 1.1 |", table)
        self.assertIn("| plain PyTorch |  |  |  |  |", table)
        self.assertNotIn("| GPT of 1B, fp32 |", text)

    def test_peers_share_a_table_with_all_their_figures(self):
        text = render(*(program("peer", [measured(name, step_ms=110, loss=2.5)]) for name in ("FSDP1", "FSDP2")))
        self.assertIn("### PyTorch\n\n|  | loss | step_ms |\n|---|---|---|\n| FSDP1 | 2.5 | 110 |\n| FSDP2 | 2.5 | 110 |",
                      text)

    def test_failures_come_with_their_texts(self):
        text = render(TESTS, BENCHMARKS)
        failures = text[text.index("## What failed"):]
        for part in ("CudaTest.Breaks", "Expected: 1", "offload/stepped_on_host/fp32", "out of memory"):
            self.assertIn(part, failures)
        self.assertNotIn("CudaTest.Runs", failures)

    def test_a_program_that_died_leaves_its_last_words(self):
        text = render(program("test", [], outcome=report.TIMED_OUT, exit_code=-9))
        self.assertIn("a test: timed out, exit code -9", text)
        self.assertIn("last words", text)

    def test_long_failures_are_cut(self):
        cases = [{**measured("A.B"), "outcome": report.FAILED, "message": "\n".join(map(str, range(100)))}]
        self.assertEqual(markdown.failures(program("test", cases), lines=3),
                         ["- A.B", "", "  ```", "  0", "  1", "  2", "  ```", ""])

    def test_nothing_failed(self):
        good = program("test", report.test_cases(json.dumps({"testsuites": [{"name": "A", "testsuite": [
            {"name": "B", "status": "RUN", "result": "COMPLETED"}]}]})))
        self.assertNotIn("## What failed", render(good, program("sanitizer", [], outcome=report.SKIPPED)))

    def test_numbers(self):
        self.assertEqual([markdown.number(value) for value in (0, 0.98765, 12, 123456.7, None)],
                         ["0", "0.9877", "12", "123,457", ""])


if __name__ == "__main__":
    unittest.main()
