#!/usr/bin/env python3
"""Runs with --replicas: what they train, and what it costs them to lose ranks.

The program is this test's runfile testing/gpt/train, or testing/train_with_faults. The environment's REPLICAS_RUN_SEED draws other moments and victims.
"""
import json
import os
import pathlib
import random
import re
import signal
import time
import unittest

from training_run import Run, RunTest, committed_steps, sums

WITH_FAULTS = "testing/gpt/testing/train_with_faults"
KILLS = 3
STEPS = 2500  # some seconds: a line that a run has printed is seen, and answered, in far less
MODEL = ["--layers=1", "--dim=32", "--heads=2", "--seq=8", "--vocab=64", "--batch=2", "--threads=1", "--warmup=0"]


class ReplicasRunTest(RunTest):
    def setUp(self):
        super().setUp()
        self.slow = self.folder / "slow"
        self.draw = random.Random(int(os.environ.get("REPLICAS_RUN_SEED", "5")))

    def finish(self, *flags):
        run = Run([*MODEL, *flags])
        self.assertEqual(run.wait(), 0, run.output)
        return run.output

    def start_to_lose(self, flags):
        """A run whose steps take long as long as there is `self.slow`: it does not end before what it lost is back."""
        return Run([*MODEL, *flags], {"GPT_SLOW_WHILE": str(self.slow)}, WITH_FAULTS)

    def losses(self, name):
        return json.loads((self.folder / name).read_text())["losses"]

    def await_text(self, run, pattern):
        self.await_that(lambda: re.search(pattern, run.output, re.MULTILINE), run)

    def test_trains_what_as_many_ranks_without_replicas_train(self):
        self.finish("--steps=30", "--ranks=2", f"--json={self.folder / 'alone'}", f"--export={self.folder / 'expected'}")
        output = self.finish("--steps=30", "--replicas=2", "--ranks=1", f"--json={self.folder / 'json'}",
                             f"--export={self.folder / 'model'}")
        self.assertIn("from step 1 on replicas 0.1 1.1\n", output)
        alone, first, second = self.losses("alone"), self.losses("json.0"), self.losses("json.1")
        self.assertEqual([len(losses) for losses in (alone, first, second)], [30, 30, 30])
        self.assertNotEqual(first[0], second[0])  # other rows
        for step, loss in enumerate(alone):
            self.assertAlmostEqual((first[step] + second[step]) / 2, loss, delta=1e-4 * loss, msg=f"step {step}")
        self.assertEqual(sums(self.folder / "model").keys(), sums(self.folder / "expected").keys())

    def ranks_of(self, run, replica):
        """The ranks of a replica that run, below the launcher of its own."""
        found = []
        for launcher in run.ranks():
            path = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children")
            children = [int(pid) for pid in path.read_text().split()] if path.exists() else []
            for pid in children:
                try:
                    variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if f"FSDP_REPLICA={replica}".encode() in variables and any(v.startswith(b"RANK=") for v in variables):
                    found.append(pid)
        return found

    def test_what_is_lost_comes_back_and_a_replay_has_the_same_bits(self):
        flags = [f"--steps={STEPS}", "--replicas=2", "--ranks=2", "--max_restarts=20"]
        self.slow.touch()
        run = self.start_to_lose([*flags, f"--replica_history={self.folder / 'history'}",
                                  f"--json={self.folder / 'json'}", f"--export={self.folder / 'model'}"])
        lives = [1, 1]
        for _ in range(KILLS):
            self.await_text(run, rf"^\[.*from step \d+ on replicas 0\.{lives[0]} 1\.{lives[1]}$")
            self.slow.unlink()
            replica = self.draw.randrange(2)
            time.sleep(self.draw.uniform(0, 0.02))
            os.kill(self.draw.choice(self.ranks_of(run, replica)), signal.SIGKILL)
            self.slow.touch()
            lives[replica] += 1
        self.await_text(run, rf"^\[.*from step \d+ on replicas 0\.{lives[0]} 1\.{lives[1]}$")
        self.slow.unlink()
        self.assertEqual(run.wait(), 0, run.output)
        self.finish(*flags, f"--replica_replay={self.folder / 'history'}", f"--json={self.folder / 'again'}",
                    f"--export={self.folder / 'again_model'}")
        self.assertEqual(sums(self.folder / "model"), sums(self.folder / "again_model"))
        for replica in range(2):
            self.assertEqual(self.losses(f"json.{replica}"), self.losses(f"again.{replica}"))

    def test_a_replay_that_loses_what_its_history_does_not_fails(self):
        history = self.folder / "history"
        history.mkdir()
        (history / "replica-0.txt").write_text("epoch 0 founded at step 0 by 0.1: replicas 0.1 1.1\n")
        run = Run([*MODEL, "--steps=1000000", "--replicas=2", "--ranks=2", "--max_restarts=20",
                   f"--replica_replay={history}", f"--json={self.folder / 'json'}"])
        self.await_text(run, r"from step 1 on replicas 0\.1 1\.1$")
        os.kill(self.draw.choice(self.ranks_of(run, self.draw.randrange(2))), signal.SIGKILL)
        self.assertEqual(run.wait(), 2, run.output)
        for replica in range(2):
            self.assertIn(f"the history has no step of replica {replica}.2: replica {replica}.1 took part to the end", run.output)
            self.assertFalse((self.folder / f"json.{replica}").exists())

    def test_what_is_not_started_again_stays_away(self):
        self.slow.touch()
        run = self.start_to_lose(["--steps=500", "--replicas=2", "--ranks=1", f"--json={self.folder / 'json'}"])
        self.await_text(run, r"from step 1 on replicas 0\.1 1\.1$")
        os.kill(self.ranks_of(run, 1)[0], signal.SIGKILL)
        self.slow.unlink()
        self.assertEqual(run.wait(), 0, run.output)
        self.assertRegex(run.output, r"\n\[0\.0\] from step \d+ on replicas 0\.1\n")
        self.assertIn("replica 1 exited with code 137", run.output)
        self.assertEqual(len(self.losses("json.0")), 500)
        self.assertFalse((self.folder / "json.1").exists())

    def test_who_is_lost_after_the_last_step_takes_no_model_along(self):
        # In the second all-reduce of the last step, that of the loss, at the end.
        for replica in range(2):
            fault = f"fault=kill,replica={replica},rank=0,step=30,operation=all_reduce,call=1"
            run = Run([*MODEL, "--steps=30", "--replicas=2", "--ranks=2", f"--json={self.folder / f'json{replica}'}",
                       f"--export={self.folder / f'model{replica}'}"], {"GPT_FAULT_PLAN": fault}, WITH_FAULTS)
            self.assertEqual(run.wait(), 0, run.output)
            self.assertIn("injected kill into step 30", run.output)
            self.assertEqual(len(self.losses(f"json{replica}.{1 - replica}")), 30)
            self.assertTrue(sums(self.folder / f"model{replica}"))
        self.assertEqual(sums(self.folder / "model0"), sums(self.folder / "model1"))

    def test_goes_on_after_it_was_stopped(self):
        flags = ["--replicas=2", "--ranks=1", f"--save={self.folder / 'save'}", "--save_every=10", "--resume"]
        run = Run([*MODEL, "--steps=1000000", *flags])
        self.await_text(run, r"from step 1 on replicas 0\.1 1\.1$")
        self.await_that(lambda: committed_steps(self.folder / "save.0"), run)
        self.assertEqual(committed_steps(self.folder / "save.1"), [])  # the first one saves
        run.process.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(), 128 + signal.SIGTERM, run.output)
        newest = max(step for replica in range(2) for step in committed_steps(self.folder / f"save.{replica}"))
        output = self.finish(f"--steps={newest + 20}", *flags)
        self.assertIn(f"from step {newest + 1} on replicas 0.1 1.1\n", output)
        self.assertEqual(committed_steps(self.folder / "save.0")[-1], newest + 20)

    def test_what_cannot_be_is_refused(self):
        run = Run([*MODEL, "--replica_replay=x"])
        self.assertEqual(run.wait(), 2, run.output)
        self.assertIn("--replica-replay without --replicas", run.output)


if __name__ == "__main__":
    unittest.main()
