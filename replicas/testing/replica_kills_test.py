#!/usr/bin/env python3
"""Kills ranks of replicas, one after the other, and looks at what was trained.

  REPLICA_KILLS=1000   so many kills instead of a few
"""

import glob
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

PROGRAM = "replicas/testing/kills_trainer"  # among this test's runfiles
KILLS = int(os.environ.get("REPLICA_KILLS", "6"))
REPLICAS, RANKS = 2, 2
STEPS_PER_KILL = 150  # at least: a new replica has to find somebody to join
SECONDS_PER_KILL = 30


def variables_of(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
    except OSError:
        return {}


def ranks_of(mark):
    """{(replica, rank): pid} of the processes that `mark` is in the environment of."""
    found = {}
    for path in glob.glob("/proc/[0-9]*"):
        variables = variables_of(path[6:])
        if variables.get(b"KILLS_MARK") != mark.encode() or b"RANK" not in variables or b"FSDP_REPLICA" not in variables:
            continue
        found[int(variables[b"FSDP_REPLICA"]), int(variables[b"RANK"])] = int(path[6:])
    return found


def anybody_has(mark):
    return [path for path in glob.glob("/proc/[0-9]*") if variables_of(path[6:]).get(b"KILLS_MARK") == mark.encode()]


def last_line(path):
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 200))
            lines = file.read().decode().split("\n")
            return lines[-2] if len(lines) > 1 else ""
    except OSError:
        return ""


class Run:
    """A run in a folder of its own."""

    def __init__(self, steps, replay=None):
        self.folder = tempfile.mkdtemp()
        self.steps = steps
        self.mark = f"{os.getpid()}-{random.random()}"
        command = [PROGRAM, self.folder, str(steps), str(REPLICAS), str(RANKS)] + ([replay] if replay else [])
        self.output = open(os.path.join(self.folder, "output"), "wb")
        self.process = subprocess.Popen(command, env=dict(os.environ, KILLS_MARK=self.mark), stdout=self.output,
                                        stderr=subprocess.STDOUT)

    def newest_of(self, replica):
        """The newest step that `replica` has finished, and the incarnations of those that did, by replica."""
        words = last_line(os.path.join(self.folder, f"replica-{replica}.rank-0")).split()
        members = dict(map(int, word.split(".")) for word in words[2:])
        return (int(words[0]), members) if words else (-1, {})

    def text(self):
        self.output.flush()
        with open(os.path.join(self.folder, "output"), errors="replace") as file:
            return file.read()[-4000:]

    def hashes(self, test):
        """{(step, rank): hash}; what several replicas say of one has to be the same, and each says it once."""
        found = {}
        for replica in range(REPLICAS):
            for rank in range(RANKS):
                before = -1
                with open(os.path.join(self.folder, f"replica-{replica}.rank-{rank}")) as file:
                    for line in file:
                        step, value = int(line.split()[0]), line.split()[1]
                        test.assertGreater(step, before, "a step was finished twice")
                        before = step
                        test.assertEqual(found.setdefault((step, rank), value), value, (step, replica, rank))
        return found

    def end(self):
        self.process.kill()
        self.process.wait()
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ReplicaKillsTest(unittest.TestCase):

    def start(self, *arguments):
        run = Run(*arguments)
        self.addCleanup(run.end)
        return run

    def await_whole(self, run, lives, deadline):
        """Until all replicas finish a step together in these lives or later ones, or the run ends. The step."""
        while time.time() < deadline:
            ended = run.process.poll()
            if ended is not None:  # those that were left were faster than whoever comes back
                self.assertEqual(ended, 0, run.text())
                return run.steps
            step, members = min((run.newest_of(replica) for replica in range(REPLICAS)), key=lambda newest: newest[0])
            if len(members) == REPLICAS and all(members[replica] >= lives[replica] for replica in members):
                return step
            time.sleep(0.01)
        self.fail("the replicas did not get together again:\n" + run.text())

    def test_kills_cost_no_step_and_a_replay_has_the_same_bits(self):
        chance = random.Random(5)
        steps = KILLS * STEPS_PER_KILL
        run = self.start(steps)
        kills, away, lives = 0, [], [1] * REPLICAS
        while kills < KILLS:
            began = time.time()
            if self.await_whole(run, lives, began + SECONDS_PER_KILL) > steps - STEPS_PER_KILL:
                break
            if kills:
                away.append(time.time() - began)
            time.sleep(chance.random() * 0.05)  # anywhere in a step
            ranks = ranks_of(run.mark)
            victim = chance.choice(sorted(ranks))
            os.kill(ranks[victim], signal.SIGKILL)
            lives[victim[0]] += 1
            kills += 1
        self.assertEqual(run.process.wait(SECONDS_PER_KILL * 4), 0, run.text())
        self.assertGreaterEqual(kills, (KILLS + 1) // 2)
        self.assertEqual(anybody_has(run.mark), [])
        hashes = run.hashes(self)
        self.assertEqual(set(hashes), {(step, rank) for step in range(steps) for rank in range(RANKS)})
        print(f"{kills} kills in {steps} steps; together again after {sorted(away)[len(away) // 2]:.2f} s (median),"
              f" {max(away):.2f} s (most)" if away else "one kill")

        replay = self.start(steps, os.path.join(run.folder, "history"))
        self.assertEqual(replay.process.wait(SECONDS_PER_KILL * (KILLS + 4)), 0, replay.text())
        self.assertEqual(replay.hashes(self), hashes)
        self.assertEqual(anybody_has(replay.mark), [])


if __name__ == "__main__":
    unittest.main()
