#!/usr/bin/env python3
"""Tests of progress and of what counts as the same training; peers_test.py runs whole measurements."""
import io
import unittest

import contenders
import measure
import processes

SHAPE = contenders.Shape(1, 64, steps=2, warmup=0)


class ProgressTest(unittest.TestCase):

    def setUp(self):
        self.now = 0.0
        self.out = io.StringIO()

    def test_what_is_left_is_taken_to_last_as_long_as_before(self):
        progress = measure.Progress(["a", "b", "a", "a", "b", "c"], self.out, lambda: self.now)
        for name, seconds in [("a", 10), ("b", 30), ("a", 20)]:
            progress.run(name, f"run {name}", lambda seconds=seconds: self.work(seconds))
        # a: 15 on average, b: 30, c: unknown, so as long as usual.
        self.assertEqual(progress.remaining_seconds(), 15 + 30 + (15 + 30) / 2)
        self.assertEqual(self.out.getvalue().splitlines(), [
            "[1/6] run a: took 10   (50 s left)", "[2/6] run b: took 30   (70 s left)",
            "[3/6] run a: took 20   (68 s left)"])

    def test_minutes_and_the_end(self):
        progress = measure.Progress(["a", "a"], self.out, lambda: self.now)
        for _ in range(2):
            progress.run("a", "run", lambda: self.work(240))
        self.assertEqual(self.out.getvalue(), "[1/2] run: took 240   (4 min left)\n[2/2] run: took 240\n")

    def work(self, seconds):
        self.now += seconds
        return f"took {seconds}"


class SameTrainingTest(unittest.TestCase):

    def setUp(self):
        self.by_key = {contender.key: contender for contender in contenders.CONTENDERS}
        self.measured = measure.Measured(list(contenders.CONTENDERS), [SHAPE])
        programs = contenders.Programs("train", None)
        self.steps = measure.TrainSteps(programs, self.measured, rounds=2, deadline=1, folder=".", out=io.StringIO())

    def check(self, key, losses, params=7):
        self.steps.check(self.by_key[key], SHAPE, contenders.Result(1.0, losses, params))

    def test_all_against_the_first(self):
        self.check("ours", [5.0, 4.0])
        self.check("floor", [5.0, 3.0])
        self.check("fsdp2", [5.0, 4.00001])
        self.check("ours_twice", [5.0, 2.0])
        with self.assertRaisesRegex(processes.RunError, "FSDP1.* does not train as libtorch_fsdp does: .*2 is 4.1"):
            self.check("fsdp1", [5.0, 4.1])
        with self.assertRaisesRegex(processes.RunError, "FSDP1 trains 8 parameters, libtorch_fsdp 7"):
            self.check("fsdp1", [5.0, 4.0], params=8)

    def test_every_round_counts(self):
        self.check("ours", [5.0, 4.0])
        with self.assertRaisesRegex(processes.RunError, "step 2 is 4.1 instead of 4"):
            self.check("ours", [5.0, 4.1])

    def test_a_floor_that_was_first_vouches_for_one_loss(self):
        self.check("floor", [5.0, 3.0])
        self.check("ours", [5.0, 4.0])
        with self.assertRaisesRegex(processes.RunError, "as libtorch_fsdp does: the loss of step 2"):
            self.check("fsdp2", [5.0, 4.1])


if __name__ == "__main__":
    unittest.main()
