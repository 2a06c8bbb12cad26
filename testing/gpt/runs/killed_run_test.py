#!/usr/bin/env python3
"""A run that is killed 20 times, at random moments, and started again with --resume each time: it ends with the bits of
one that was never killed.

The program is this test's runfile testing/gpt/train, below the directory that the test starts in. The seed that a
moment is drawn from is printed; the environment's KILLED_RUN_SEED has another one for all of them.
"""
import collections
import json
import os
import random
import re
import time
import unittest

from training_run import Run, RunTest, committed_steps, sums

KILLS = 20
RANKS = 2
SAVE_EVERY = 6  # steps
STEPS_AFTER = 15  # of the last start, behind the newest checkpoint
MODEL = ["--layers=3", "--dim=96", "--heads=2", "--seq=16", "--vocab=256", "--batch=2", "--threads=1", "--seed=3",
         "--warmup=0", f"--ranks={RANKS}"]
BEFORE, DURING, BETWEEN = "before the first checkpoint", "during a save", "between two saves"


def unfinished(folder):
    """What saves have left, or are at: names with inodes, as a later save may write the same step again."""
    found = set()
    if folder.exists():
        for entry in os.scandir(folder):
            if ".incomplete-" in entry.name:
                found.add((entry.name, entry.inode()))
    return found


class Moment:
    """When a run is killed, and how; all of it from `seed`."""

    def __init__(self, seed, first):
        self.seed = seed
        draw = random.Random(seed)
        # The first ones come before there is anything to go on from.
        self.kind = "start" if first else draw.choice(["start", "save", "save", "saved", "any"])
        longest = 0.2 if first else {"start": 0.5, "save": 0.01, "saved": 0.01, "any": 0.4}[self.kind]
        # Half of the kills during a save come in its first millisecond: a fast machine has not finished it then.
        self.delay = longest * draw.random() ** (3 if self.kind == "save" else 1)
        # Ranks that still look for each other wait for a dead one until their launcher ends them.
        self.victim = None if self.kind == "start" else draw.choice([None, None, draw.randrange(RANKS)])
        self.flag = draw.choice(["--save_async", "--save_async", "--nosave_async"])

    def __str__(self):
        victim = "all" if self.victim is None else f"rank {self.victim}"
        return f"seed {self.seed}: {victim}, {1000 * self.delay:.1f} ms after {self.kind!r}, {self.flag}"

    def wait_for(self, run, folder, left):
        """`left`: unfinished() before the run."""
        newest = committed_steps(folder)[-1:]
        reached = {
            "start": lambda: len(run.ranks()) == RANKS,
            "save": lambda: unfinished(folder) - left,
            "saved": lambda: committed_steps(folder)[-1:] != newest,
            "any": lambda: "step " in run.output,
        }[self.kind]
        while not reached() and not run.ended():
            time.sleep(0.0005)
        time.sleep(self.delay)


class KilledRunTest(RunTest):
    def flags(self, save, *others):
        return [f"--save={save}", "--keep_last=3", "--resume", *others]

    def finish(self, save, steps, *others):
        """Runs to the end; the losses of its steps."""
        report = self.folder / "report.json"
        run = Run(MODEL + self.flags(save, f"--steps={steps}", f"--json={report}", *others))
        self.assertEqual(run.wait(), 0, run.output)
        return run.output, json.loads(report.read_text())["losses"]

    def kill_once(self, save, moment):
        """The phase in which it was killed."""
        left, steps = unfinished(save), committed_steps(save)
        # More steps than it can get to.
        run = Run(MODEL + self.flags(save, f"--save_every={SAVE_EVERY}", "--steps=1000000", moment.flag))
        moment.wait_for(run, save, left)
        self.assertFalse(run.ended(), run.output)
        self.assertTrue(run.kill(moment.victim), run.output)
        self.assertNotEqual(run.wait(), 0, run.output)
        resumed = re.search(r"goes on after step (\d+)", run.output)
        if resumed is not None:
            self.assertEqual(int(resumed[1]), steps[-1], run.output)
        elif "step " in run.output:
            self.assertEqual(steps, [], run.output)
        now = committed_steps(save)
        # One that could be loaded is never lost.
        self.assertGreaterEqual(now[-1:], steps[-1:])
        if unfinished(save) - left:
            return DURING
        return BETWEEN if now else BEFORE

    def test_ends_with_the_bits_of_an_unbroken_run(self):
        save = self.folder / "killed"
        seeds = random.Random(int(os.environ.get("KILLED_RUN_SEED", "21")))
        phases = collections.Counter()
        for kill in range(KILLS):
            moment = Moment(seeds.getrandbits(32), first=kill < 3)
            phase = self.kill_once(save, moment)
            phases[phase] += 1
            print(f"kill {kill + 1}, {moment}: {phase}, newest {committed_steps(save)[-1:]}", flush=True)
        steps = committed_steps(save)[-1] + STEPS_AFTER
        output, losses = self.finish(save, steps, f"--save_every={SAVE_EVERY}")
        self.assertIn(f"goes on after step {steps - STEPS_AFTER}", output)
        _, unbroken = self.finish(self.folder / "unbroken", steps)
        print(f"{steps} steps; {dict(phases)}")
        self.assertEqual(len(unbroken), steps)
        self.assertEqual(losses, unbroken[-STEPS_AFTER:])
        expected = sums(self.folder / "unbroken" / f"step-{steps}")
        self.assertEqual(sums(save / f"step-{steps}"), expected)
        self.assertEqual(set(expected), {"model.safetensors", "optimizer/exp_avg.safetensors",
                                         "optimizer/exp_avg_sq.safetensors", "training.json", "config.json"})
        for phase in (BEFORE, DURING, BETWEEN):
            self.assertGreaterEqual(phases[phase], 1, f"no kill came {phase}")


if __name__ == "__main__":
    unittest.main()
