#!/usr/bin/env python3
"""Tests of medians, ratios, targets and the comparison of losses."""
import unittest

import summary


class SummaryTest(unittest.TestCase):

    def test_median_and_spread(self):
        self.assertEqual(summary.summarize([3, 1, 10]), summary.Summary(3, 1, 10, (3, 1, 10)))
        self.assertEqual(summary.summarize([1, 2]).median, 1.5)
        self.assertIsNone(summary.summarize([]))

    def test_ratios_are_of_the_same_round(self):
        # Twice as slow a machine in the second round: the medians' ratio would be 2.
        self.assertEqual(summary.paired_ratio([100, 220, 330], [100, 200, 165]).values, (1.0, 1.1, 2.0))
        self.assertEqual(summary.paired_ratio([100, 220, 330], [100, 200, 165]).median, 1.1)
        self.assertEqual(summary.paired_ratio([300.0], [100.0], scale=2).median, 1.5)

    def test_ratio_of_what_was_not_measured(self):
        self.assertIsNone(summary.paired_ratio([1], None))
        self.assertIsNone(summary.paired_ratio([], [1]))
        with self.assertRaises(ValueError):
            summary.paired_ratio([1], [1, 2])

    def test_targets(self):
        most, least = summary.Target(1.05), summary.Target(2.6, at_least=True)
        self.assertTrue(most.holds(1.0549))  # printed as 1.05
        self.assertFalse(most.holds(1.056))
        self.assertTrue(least.holds(2.6))
        self.assertFalse(least.holds(2.59))
        self.assertEqual((str(most), str(least)), ("<= 1.05", ">= 2.60"))

    def test_losses_that_agree(self):
        self.assertIsNone(summary.loss_difference([5.0, 4.0], [5.00004, 4.0], 2))
        # Only the first count losses, and only those that both have.
        self.assertIsNone(summary.loss_difference([5.0, 4.0], [5.0, 3.0], 1))
        self.assertIsNone(summary.loss_difference([5.0, 4.0, 1.0], [5.0, 4.0], 4))

    def test_losses_that_differ(self):
        self.assertEqual(summary.loss_difference([5.0, 4.0], [5.0, 4.001], 2),
                         "the loss of step 2 is 4.001 instead of 4; a relative 1e-05 is allowed")
        nan, inf = float("nan"), float("inf")
        for theirs in (nan, inf):
            self.assertIn("step 1", summary.loss_difference([5.0], [theirs], 1))
        for both in (nan, inf):
            self.assertIn("step 1", summary.loss_difference([both], [both], 1))


if __name__ == "__main__":
    unittest.main()
