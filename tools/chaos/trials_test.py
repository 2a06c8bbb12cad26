#!/usr/bin/env python3
"""Tests of trials.py and faults.py, with shell scripts for programs: what is taken for a defect."""
import os
import pathlib
import random
import re
import tempfile
import time
import unittest

import faults
import jobs
import replica_faults  # noqa: F401  pylint: disable=unused-import
import soak
import trials
from faults import Expect, Fault, Moment, Plan

# What the example prints and writes, as far as trials look at it.
BEGINS = """#!/bin/sh
for flag; do case "$flag" in --json=*) json="${flag#--json=}";; --steps=*) steps="${flag#--steps=}";; esac; done
losses() { i=0; text=; while [ $i -lt $steps ]; do text="$text$i,"; i=$((i + 1)); done; echo "{\\"losses\\": [${text%,}]}" > "$json"; }
echo "0.1 million parameters"
"""


class OnlyRankOne(random.Random):
    def randrange(self, *_):
        return 1


def plan_now(**changes):
    return Plan("now", lambda job: time.time(), Moment.TRAINING, **changes)


class TrialsTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def run_trial(self, expect, script, plan=None, within_s=60, **changes):
        program = self.folder / "program"
        program.write_text(BEGINS + script)
        program.chmod(0o755)
        runner = trials.Runner(program, 2, self.folder)
        runner._expected[2] = [float(step) for step in range(faults.STEPS)]
        plan = plan or plan_now(**changes)
        return runner.run(Fault("some", expect, "", lambda trial: plan, within_s=within_s), "gloo", 1)

    def test_a_job_that_survives_has_the_losses_of_one_without_a_fault(self):
        self.assertEqual(self.run_trial(Expect.SURVIVES, "losses").defects, [])
        self.assertEqual(self.run_trial(Expect.SURVIVES, "losses; sed -i s/7,/8,/ $json").defects,
                         ["losses are others than those of a run without a fault, from step 8 on"])
        self.assertEqual(self.run_trial(Expect.SURVIVES, "exit 3").defects, ["it failed, with [3]"])

    def test_a_job_that_fails_says_why(self):
        result = self.run_trial(Expect.FAILS, "echo '[0] UNAVAILABLE: rank 1 is gone, port 1234' >&2; exit 1",
                                says="rank 1", victims={1})
        self.assertEqual(result.defects, [])
        self.assertEqual(result.errors, ["UNAVAILABLE: rank N is gone, port N"])
        self.assertIsNotNone(result.detection_s)
        self.assertEqual(self.run_trial(Expect.FAILS, "exit 1", says="rank 1").defects, ["no rank's error has 'rank 1'"])
        self.assertEqual(self.run_trial(Expect.FAILS, "exit 0").defects, ["it ended well"])

    def wrong_ends(self, name, text, codes=(1,)):
        """What is wrong with such an end of a job of three ranks by this fault, of rank 1."""
        setup = jobs.Setup(self.folder, [], 3, {})
        trial = faults.Trial(setup, "gloo", OnlyRankOne(), self.folder)
        plan = faults.FAULTS[name].prepare(trial)
        plan.close()
        return [defect.split(" ")[0] for defect in trials.wrong_ends(text, plan, list(codes))]

    def test_the_launchers_word_is_none_of_the_ranks(self):
        gone = "[0] UNAVAILABLE: fence #1 on rank 0 of 3: rank 1 (last seen in fence #1; process 7 has ended) is gone\n"
        launcher = "rank 1 was killed by signal 9 (SIGKILL); then ranks 0, 2 exited with code 1\n"
        for name in ("kill", "step_kill"):
            self.assertEqual(self.wrong_ends(name, gone + launcher), [])
            self.assertEqual(self.wrong_ends(name, launcher), ["no"])
            self.assertEqual(self.wrong_ends(name, gone), ["the"])
            self.assertEqual(self.wrong_ends(name, gone + launcher.replace("9", "11")), ["the"])
            self.assertEqual(self.wrong_ends(name, gone.replace("rank 1 (", "rank 2 (") + launcher), ["another", "no"])
            # What another one says besides, and what the victim does.
            self.assertEqual(self.wrong_ends(name, gone + "[2] INTERNAL: all-gather on rank 1 of 3: bad\n" + launcher), ["another"])
            self.assertEqual(self.wrong_ends(name, gone + "[1] INTERNAL: bad\n" + launcher), [])

    def test_each_fault_has_its_own_end(self):
        ends = {"kill_launcher": ("", -9), "terminal_gone": ("interrupted by signal 1 (SIGHUP)\n", 129),
                "keeper": ("the keeper of the replicas was killed by signal 9 (SIGKILL)\n", 1),
                "file_size": ("[0] RESOURCE_EXHAUSTED: rank 0: write f: File too large\n", 1),
                "step_error": ("[0] ABORTED: rank 1 aborted: an injected error\nrank 1 exited with code 1\n", 1),
                "step_throw": ("[0] ABORTED: rank 1 aborted: an injected exception\nrank 1 exited with code 1\n", 1),
                "step_exit": ("[0] ABORTED: lost the connection to rank 1: closed\nrank 2 exited with code 1; then rank 1 exited with code 0\n", 1),
                "stop": ("[0] DEADLINE_EXCEEDED: rank 1 does not answer\nrank 1 was ended by the launcher with signal 9\n", 1)}
        for name in ends:
            for of, (text, code) in ends.items():
                self.assertEqual(self.wrong_ends(name, text, (code,)) == [], name == of, f"{name} that ends as {of}")

    def test_who_is_missed_is_named(self):
        for text in ("rank 1 is gone", "rank 1 (no call so far) is gone", "rank 0 (world rank 1) (no call so far) is gone", "met at a:1; missing: rank 1 (started by --ranks)",
                     "rank 1, rank 2 do not answer: dead", "nothing is known of rank 0, rank 1, because the store does not answer",
                     "still missing: rank 0 (last seen in step 1; process 3 runs), rank 1 (last seen in step 1; process 4 is stopped)"):
            self.assertIsNotNone(re.search(faults._lost(1), text), text)
            self.assertIsNone(re.search(faults._lost(3), text), text)
        for text in ("fence #1 on rank 1 of 2: bad", "rank 12 is gone", "rank 2 (last seen in fence #1 of rank 1) is gone", "rank 1 (world rank 2) is gone",
                     "rank 1 is in fence #1; rank 2 does not answer", "nobody answers at 127.0.0.1:3"):
            self.assertIsNone(re.search(faults._lost(1), text), text)
        self.assertIsNotNone(re.search(faults._lost(0), "nobody answers at 127.0.0.1:3"))

    def test_texts_are_alike_without_numbers(self):
        self.assertEqual(trials.errors_of("[1] UNKNOWN: write /a/b/trial.x1/run/step-6.incomplete-1ab2/x: full\n"
                                          "UNKNOWN: write /c/trial.y/run/step-12.incomplete-c/x: full\nplain 3\n"),
                         ["UNKNOWN: write DIR/run/step-N.incomplete-N/x: full"])

    def test_crashes_are_defects_but_for_those_of_the_victim(self):
        text = "echo '[1] terminate called'; echo 'rank 1 was killed by signal 6'; exit 1"
        self.assertEqual(self.run_trial(Expect.EITHER, text, victims={1}).defects, [])
        self.assertEqual(self.run_trial(Expect.EITHER, text, victims={0}).defects,
                         ["crash: [1] terminate called", "crash: signal 6 killed ranks [1]"])
        self.assertEqual(self.run_trial(Expect.EITHER, "echo 'ranks 0, 1 were killed by signal 11'; exit 1",
                                        victims={1}).defects, ["crash: signal 11 killed ranks [0]"])

    def test_what_is_left_is_a_defect(self):
        result = self.run_trial(Expect.FAILS, "touch $TMPDIR/file; exit 1")
        self.assertEqual(len(result.defects), 1)
        self.assertRegex(result.defects[0], r"left behind: .*/tmp/file")

    def test_a_hang_is_a_defect(self):
        limit, trials.LIMIT_S = trials.LIMIT_S, 0.3
        try:
            result = self.run_trial(Expect.FAILS, "sleep 600")
        finally:
            trials.LIMIT_S = limit
        self.assertTrue(result.hang)
        self.assertIn("hangs", result.defects[0])

    def test_late_is_a_defect(self):
        self.assertEqual(self.run_trial(Expect.FAILS, "exit 1", within_s=20).defects, [])
        result = self.run_trial(Expect.FAILS, "sleep 0.2; exit 1", within_s=0.1)
        self.assertEqual(result.defects, [f"noticed after {result.detection_s} s instead of 0.1 s"])

    def test_nan_has_to_show(self):
        self.assertEqual(self.run_trial(Expect.NAN, "echo '{\"losses\": [1, null]}' > $json").defects, [])
        self.assertEqual(self.run_trial(Expect.NAN, "losses").defects, ["the last loss is 399"])

    def test_a_fault_that_never_comes_is_a_defect(self):
        result = self.run_trial(Expect.FAILS, "exit 1", Plan("by the program"))
        self.assertIn("the program has not come to the fault", result.defects)
        result = self.run_trial(Expect.FAILS, "echo 'injected kill into step 3 at 1000.5'; exit 1", Plan("by it"))
        self.assertGreater(result.detection_s, 1000)
        self.assertEqual(len(result.defects), 1)  # late

    def test_every_fault_has_its_turn(self):
        some = [(fault, "gloo") for fault in list(faults.FAULTS.values())[:5]]
        chosen = trials.choose(some, 3, seed=3)
        self.assertEqual(len(chosen), 15)
        for turn in (chosen[:5], chosen[5:10], chosen[10:]):
            self.assertEqual({fault.name for fault, _, _ in turn}, {fault.name for fault, _ in some})
        self.assertEqual(len({seed for _, _, seed in chosen}), 15)
        self.assertEqual(chosen, trials.choose(some, 3, seed=3))
        self.assertNotEqual(chosen, trials.choose(some, 3, seed=4))
        self.assertEqual(chosen[:10], trials.choose(some, 2, seed=3))

    def test_what_has_a_result_is_not_done_again(self):
        chosen = trials.choose([(fault, "gloo") for fault in list(faults.FAULTS.values())[:3]], 2, seed=3)
        results = [trials.Result(fault.name, backend, seed) for fault, backend, seed in chosen[1:4]]
        self.assertEqual(trials.remaining(chosen, results), [chosen[0], *chosen[4:]])
        results = [trials.Result(chosen[0][0].name, "gloo", chosen[0][2] + 1),
                   trials.Result(chosen[0][0].name, "shared_memory", chosen[0][2])]
        self.assertEqual(trials.remaining(chosen, results), chosen)

    def test_outcomes(self):
        self.assertEqual(self.run_trial(Expect.SURVIVES, "losses").outcome(), "survives")
        self.assertEqual(self.run_trial(Expect.FAILS, "exit 3").outcome(), "fails")
        self.assertEqual(trials.Result("kill", "gloo", 1, codes=[0, 1]).outcome(), "fails")
        self.assertEqual(trials.Result("kill", "gloo", 1, codes=[None], hang=True).outcome(), "hangs")
        self.assertEqual(trials.Result("loss", "gloo", 1, skipped="no netem").outcome(), "skipped")

    def test_a_soak_has_a_fault_in_each_attempt(self):
        entries = soak.fault_plan(trials.random.Random(1), 40, 3, 100).split(";")
        for attempt, entry in enumerate(entries):
            match = re.fullmatch(r"fault=\w+,restart=(\d+),rank=([012]),step=(\d+),when=(start|wait)", entry)
            self.assertIsNotNone(match, entry)
            self.assertEqual(int(match[1]), attempt)
            self.assertTrue(90 <= int(match[3]) <= 100)


if __name__ == "__main__":
    unittest.main()
