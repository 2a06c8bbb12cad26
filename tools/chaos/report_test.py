#!/usr/bin/env python3
"""Tests of report.py."""
import json
import unittest

import report
from trials import Result

RESULTS = [
    Result("kill", "gloo", 1, "rank 0", took_s=6.0, detection_s=0.5, codes=[137], errors=["ABORTED: rank N"]),
    Result("kill", "gloo", 2, "rank 1", detection_s=2.5, codes=[137], errors=["ABORTED: rank N", "A|B: x"]),
    Result("kill", "gloo", 3, "rank 1", detection_s=1.0, hang=True, defects=["it hangs"], output="the end"),
    Result("loss", "gloo", 4, skipped="no netem"),
    Result("kill", "shared_memory", 5, "rank 1", left=["port 3"], defects=["left behind: port 3"]),
]


class ReportTest(unittest.TestCase):
    def test_sums_up_by_fault_and_backend(self):
        kill, shared, loss = report.summarize(RESULTS)[0], report.summarize(RESULTS)[1], report.summarize(RESULTS)[2]
        self.assertEqual((kill.fault, kill.backend, kill.trials, kill.hangs, kill.left, kill.defects),
                         ("kill", "gloo", 3, 1, 0, 1))
        self.assertEqual(kill.outcomes, {"fails": 2, "hangs": 1})
        self.assertEqual((kill.took_s, loss.took_s), (2.0, 0))
        self.assertEqual(kill.detection_s, [0.5, 1.0, 2.5])
        self.assertEqual((shared.backend, shared.left, shared.defects, shared.detection_s), ("shared_memory", 1, 1, None))
        self.assertEqual((loss.trials, loss.skipped), (0, 1))

    def test_is_for_people(self):
        text = report.to_markdown(RESULTS, {"seed": "7"})
        for line in ("- seed: 7", "| kill | gloo | 3 | fails 2, hangs 1 | 0.50 / 1.00 / 2.50 | 1 | 0 | 1 |",
                     "| loss | gloo | 0 (1 skipped) | - | - | 0 | 0 | 0 |", "| all | | 4 | | | 1 | 1 | 2 |", "### kill, gloo, seed 3", "- it hangs", "the end",
                     "- loss: no netem", "| kill | ABORTED: rank N | 2 |", "| kill | A\\|B: x | 1 |"):
            self.assertIn(line + "\n", text)
        self.assertIn("## Defects\n\nNone.\n", report.to_markdown(RESULTS[:2], {}))

    def test_and_for_programs(self):
        data = json.loads(json.dumps(report.to_json(RESULTS, {"seed": "7"})))
        self.assertEqual(len(data["trials"]), 5)
        self.assertEqual(data["trials"][2]["defects"], ["it hangs"])
        self.assertEqual(data["summary"][0]["detection_s"], [0.5, 1.0, 2.5])
        self.assertEqual(report.from_json(data), RESULTS)


if __name__ == "__main__":
    unittest.main()
