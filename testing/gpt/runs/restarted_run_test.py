#!/usr/bin/env python3
"""A run with --max_restarts whose ranks are killed ends with the bits of one that was never killed; where it goes on with
fewer ranks, with those of a run of so many that goes on from the same checkpoint.

The program is this test's runfile testing/gpt/train, below the directory that the test starts in. The environment's
RESTARTED_RUN_SEED draws other moments and victims.
"""
import json
import os
import random
import re
import shutil
import signal
import time
import unittest

import training_run
from training_run import Run, RunTest, committed_steps, sums

KILLS = 5
STEPS = 400
MODEL = ["--layers=2", "--dim=64", "--heads=2", "--seq=16", "--vocab=256", "--batch=2", "--threads=1", "--seed=3",
         "--warmup=0", "--save_every=6", f"--steps={STEPS}", "--resume"]


class RestartedRunTest(RunTest):
    def setUp(self):
        super().setUp()
        self.draw = random.Random(int(os.environ.get("RESTARTED_RUN_SEED", "5")))

    def start(self, save, ranks, *flags, environment=None):
        return Run([*MODEL, f"--ranks={ranks}", f"--save={self.folder / save}", *flags], environment)

    def finish(self, *arguments, **others):
        run = self.start(*arguments, **others)
        self.assertEqual(run.wait(), 0, run.output)
        return run.output

    def await_restart(self, number, run):
        self.await_that(lambda: len(re.findall(r"^restart \d+ of", run.output, re.MULTILINE)) >= number, run)

    def kill_once(self, save, run, ranks, at_once):
        """Kills one rank, behind a checkpoint that this attempt has saved unless it is to be `at_once`."""
        newest = committed_steps(self.folder / save)[-1:]
        self.await_that(lambda: len(run.ranks()) == ranks, run)
        if not at_once:
            self.await_that(lambda: committed_steps(self.folder / save)[-1:] > newest, run)
        time.sleep(self.draw.uniform(0, 0.2 if at_once else 0.02))
        self.assertTrue(run.kill(self.draw.randrange(ranks)), run.output)

    def copy_checkpoint(self, run, step, other):
        """As the only one of another run."""
        save = self.folder / other
        save.mkdir()
        (save / ".libtorch_fsdp-checkpoints").touch()
        shutil.copytree(self.folder / run / f"step-{step}", save / f"step-{step}")
        return save

    def test_ends_with_the_bits_of_an_unbroken_run(self):
        report, model = self.folder / "report.json", self.folder / "model"
        run = self.start("killed", 3, "--max_restarts=20", f"--json={report}", "--keep_last=3", f"--export={model}")
        for kill in range(KILLS):
            self.kill_once("killed", run, 3, at_once=kill % 3 == 1)
            self.await_restart(kill + 1, run)
        self.assertEqual(run.wait(), 0, run.output)
        self.finish("unbroken", 3, f"--json={self.folder / 'unbroken.json'}", f"--export={self.folder / 'expected'}")
        self.assertEqual(sums(self.folder / "killed" / f"step-{STEPS}"),
                         sums(self.folder / "unbroken" / f"step-{STEPS}"))
        self.assertEqual(sums(model), sums(self.folder / "expected"))
        losses = json.loads(report.read_text())["losses"]
        self.assertGreater(len(losses), 0)
        self.assertLess(len(losses), STEPS)
        self.assertEqual(losses, json.loads((self.folder / "unbroken.json").read_text())["losses"][-len(losses):])
        # The report names every attempt.
        for attempt in range(KILLS):
            self.assertRegex(run.output, rf"\nattempt {attempt + 1} \(3 ranks, .*killed by signal 9")
        self.assertRegex(run.output, rf"\nattempt {KILLS + 1} \(3 ranks, .*\): ranks 0, 1, 2 exited with code 0\n$")
        self.assertRegex(run.output, r"\n\[0\] goes on after step \d+\n")

    def test_goes_on_with_the_ranks_that_are_left(self):
        run = self.start("killed", 3, "--max_restarts=2", "--restart_ranks=fewer")
        self.kill_once("killed", run, 3, at_once=False)
        self.await_restart(1, run)
        self.kill_once("killed", run, 2, at_once=False)
        self.assertEqual(run.wait(), 0, run.output)
        self.assertRegex(run.output, r"\nrestart 1 of 2, with 2 ranks, in")
        self.assertRegex(run.output, r"\nrestart 2 of 2, with 1 rank, in")
        first, second = [int(step) for step in re.findall(r"goes on after step (\d+)", run.output)]
        self.assertLess(first, second)
        for ranks, begin, end in ((2, first, second), (1, second, STEPS)):
            save = self.copy_checkpoint("killed", begin, f"as_{ranks}")
            output = self.finish(save.name, ranks, f"--steps={end}")
            self.assertIn(f"goes on after step {begin}\n", output)
            self.assertEqual(sums(save / f"step-{end}"), sums(self.folder / "killed" / f"step-{end}"))

    def test_ends_when_nothing_new_is_saved(self):
        run = self.start("killed", 2, "--max_restarts=50", "--save_every=0")
        for kill in range(3):
            self.kill_once("killed", run, 2, at_once=True)
            if kill < 2:
                self.await_restart(kill + 1, run)
        self.assertEqual(run.wait(), 128 + signal.SIGKILL, run.output)
        self.assertIn("\nnot restarted: 3 attempts in a row have not got on: nothing new was saved", run.output)
        self.assertEqual(committed_steps(self.folder / "killed"), [])

    def test_what_cannot_be_is_not_tried_again(self):
        run = self.start("never", 2, "--max_restarts=5", "--offload=ssd", "--memory_budget=1KiB")
        self.assertEqual(run.wait(), 2, run.output)
        self.assertIn("a memory budget of 1024 bytes is too small", run.output)
        self.assertIn("\nnot restarted: exit code 2", run.output)

    def test_a_stopped_run_saves_and_is_not_restarted(self):
        run = self.start("stopped", 2, "--max_restarts=5", "--steps=1000000")
        self.await_that(lambda: committed_steps(self.folder / "stopped"), run)
        run.process.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(), 128 + signal.SIGTERM, run.output)
        self.assertNotIn("restart 1", run.output)

    def test_is_restarted_by_others_who_set_torchruns_variables(self):
        """As torchrun does it, with a port of its own for each attempt and no store of its agent."""
        port = 0
        for attempt, ranks in enumerate((3, 3, 2)):
            port = training_run.free_port(but=port)
            newest = committed_steps(self.folder / "torchrun")[-1:]
            steps = STEPS if attempt == 2 else 1000000
            runs = [self.start("torchrun", 99, f"--steps={steps}", environment={
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": "2"}) for rank in range(ranks)]
            if attempt == 2:
                break
            self.await_that(lambda: committed_steps(self.folder / "torchrun")[-1:] > newest, runs[0])  # noqa: B023
            runs[self.draw.randrange(ranks)].process.kill()
            for run in runs:
                self.assertNotEqual(run.wait(adopted=False), 0, run.output)
        before = newest[0]
        for run in runs:
            self.assertEqual(run.wait(adopted=False), 0, run.output)
        self.assertIn(f"goes on after step {before}\n", runs[0].output)
        save = self.copy_checkpoint("torchrun", before, "as_2")
        self.finish("as_2", 2)
        self.assertEqual(sums(save / f"step-{STEPS}"), sums(self.folder / "torchrun" / f"step-{STEPS}"))

    def test_an_attempt_that_had_exported_is_not_in_the_way(self):
        model = self.folder / "model"
        model.mkdir()
        alone = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
        self.finish("again", 1, f"--export={model}", "--steps=6", environment=alone)
        self.assertEqual(list(model.iterdir()), [])
        run = self.start("first", 1, f"--export={model}", "--steps=6", "--max_restarts=1")
        self.assertNotEqual(run.wait(), 0, run.output)
        self.assertIn("is there already", run.output)


if __name__ == "__main__":
    unittest.main()
