#!/usr/bin/env python3
"""A model whose states are several times what its ranks may keep of them in memory: it trains, with the same losses.

The program is this test's runfile testing/gpt/train, below the directory that the test starts in.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import train_within_memory as within

MIB = 1 << 20
PROGRAM = "testing/gpt/train"
RANKS = 2
DIM, LAYERS, STEPS = 256, 48, 4
MODEL = [f"--layers={LAYERS}", f"--dim={DIM}", "--heads=4", "--vocab=64", "--seq=16", "--batch=1", "--warmup=1",
         f"--steps={STEPS - 1}", f"--ranks={RANKS}", "--threads=1", "--seed=3"]
BUDGET = 40 * MIB  # of a rank, for what rests and for its transfers
# The limit on top of the baseline, which is LibTorch itself and the channels between ranks:
#   the budget;
#   of each of three files, the blocks in flight;
#   what computes: two gathered blocks of the model, their gradients as autograd makes them, and as they are reduced;
#   slack: activations, holes in the heap, code and scratch memory of larger matrices than the baseline has, and pages of
#   libraries, which count for less while other programs use them, too.
# Without offload this model needs more than twice as much.
FILES = 3 * 8 * MIB
BLOCK = 12 * DIM * DIM * 4
LIMIT = RANKS * (BUDGET + FILES + 6 * BLOCK) + 128 * MIB
# Of parameters, gradients and both states of Adam.
BYTES_PER_PARAMETER = 16


class LargerThanMemoryTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.offload = ["--offload=ssd", f"--offload-dir={self.folder}", f"--memory-budget={BUDGET}"]

    def train(self, *flags):
        """The report of a run with as much memory as it wants."""
        report = self.folder / "train.json"
        done = subprocess.run([PROGRAM, *MODEL, *flags, f"--json={report}"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)
        return json.loads(report.read_text())

    def train_within(self, limit, *flags):
        """The exit code of the script, what it says, what it reports, and the report of the run."""
        mine, theirs = self.folder / "within.json", self.folder / "train.json"
        done = subprocess.run([sys.executable, within.__file__, f"--train={PROGRAM}", f"--limit={limit}",
                               "--over-baseline", f"--report={mine}", "--", *MODEL, *flags, f"--json={theirs}"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout)
        self.assertTrue(mine.exists(), done.stdout)
        return done.returncode, done.stdout, json.loads(mine.read_text()), theirs

    def test_trains_with_the_losses_of_the_resident_run(self):
        code, output, _, report = self.train_within(LIMIT, *self.offload)
        self.assertEqual(code, 0, output)
        offloaded = json.loads(report.read_text())
        resident = self.train()
        self.assertEqual(len(set(resident["losses"])), STEPS)
        self.assertEqual(offloaded["losses"], resident["losses"])
        # What one rank keeps, by the plan that was printed, and the whole.
        plan = offloaded["offload"]
        kept = plan["buffers"] + sum(plan[kind]["device"] for kind in ("parameters", "gradients", "optimizer"))
        self.assertLessEqual(kept, BUDGET)
        self.assertGreaterEqual(offloaded["params"] * BYTES_PER_PARAMETER, 4 * RANKS * BUDGET)
        self.assertRegex(output, r"buffers for transfers +\d+")
        # All that the disk has is read and written in each step, but for what happens to be in the buffers.
        for kind in ("parameters", "gradients", "optimizer"):
            on_disk = RANKS * plan[kind]["ssd"]
            self.assertGreater(on_disk, 0)
            self.assertGreater(plan["read_per_step"][kind], 0.8 * on_disk)
            self.assertGreater(plan["written_per_step"][kind], 0.8 * on_disk)

    def test_the_resident_run_is_stopped_at_that_limit(self):
        code, output, mine, report = self.train_within(LIMIT)
        self.assertEqual(code, 1, output)
        self.assertTrue(mine["exceeded"], output)
        self.assertFalse(report.exists())


if __name__ == "__main__":
    unittest.main()
