#!/usr/bin/env python3
"""Tests of replica_faults.py, with a shell script for the program: what is wrong with a job that survived."""
import os
import pathlib
import tempfile
import unittest

import jobs
import replica_faults

# $BREAK is what goes wrong, in a replay only where $REPLAY is set.
PROGRAM = """#!/bin/sh
for flag; do case "$flag" in
  --json=*) json="${flag#--json=}";; --export=*) model="${flag#--export=}";; --replica_replay=*) replay=yes;;
  --replica_history=*) history=yes; history_folder="${flag#--replica_history=}";;
esac; done
[ -z "$REPLAY" ] || [ "$replay" ] || BREAK=
[ "$history$replay" = yes ] || exit 9
[ "$replay" ] || { mkdir "$history_folder" && printf '0 0.1\\n2 0.2\\n' > "$history_folder/replica-0.txt"; }
[ "$replay" ] && env | grep GPT_ && exit 8
[ "$BREAK" = fail ] && { echo "no history"; exit 3; }
[ "$BREAK" = hang ] && sleep 600
[ "$BREAK" = leave ] && touch "$TMPDIR/file"
losses=1,2,3
[ "$BREAK" = losses ] && losses=1,2,4
[ "$BREAK" = fewer ] && losses=2,3
echo "{\\"losses\\": [$losses]}" > "$json.0"
echo "replayed: $replay"
[ "$BREAK" = away ] || echo '{"losses": [2, 3]}' > "$json.1"
mkdir "$model"
[ "$BREAK" = no_model ] || echo "$BREAK" | sed 's/^[^b].*//' > "$model/weights"
"""
PRINTED = "the replay has printed: replayed: yes\n"


class ReplicaFaultsTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        for name, value in (("STEPS", 3), ("REPLAY_S", 20)):
            self.addCleanup(setattr, replica_faults, name, getattr(replica_faults, name))
            setattr(replica_faults, name, value)

    def defects(self, broken, in_replay, **environment):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        program = folder / "program"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        setup = jobs.Setup(program, [f"--replica_history={folder}/history", f"--json={folder}/report.json",
                                     f"--export={folder}/model"], 2, {"BREAK": broken, **environment}, replicas=2)
        if in_replay:
            setup.environment["REPLAY"] = "yes"
        job = jobs.Job(setup, folder)
        self.addCleanup(job.kill)
        self.assertTrue(job.await_end(20))
        return replica_faults.compare_with_replay(job)

    def test_a_replay_is_the_same(self):
        self.assertEqual(self.defects("", True), [])
        self.assertEqual(self.defects("losses", False), [])  # in both

    def test_other_bits_are_defects(self):
        self.assertEqual(self.defects("losses", True), ["report.json.0: other losses than in the replay, from number 3 of 3 on,"
                                                        " 3 instead of 4; replica-0.txt: 0 0.1 | 2 0.2", PRINTED])
        self.assertIn(" 3 instead of 2;", self.defects("fewer", True)[0])
        self.assertEqual(self.defects("bits", True), ["the model is another one than that of the replay: weights", PRINTED])
        self.assertEqual(self.defects("no_model", True), ["the replay has no model", PRINTED])

    def test_a_replay_has_no_deadlines_that_a_busy_machine_misses(self):
        self.assertEqual(self.defects("", False, GPT_TIMEOUT_S="5", GPT_LOSS_TIMEOUT_S="4"), [])

    def test_who_was_never_lost_has_done_all(self):
        self.assertEqual(self.defects("fewer", False), ["no replica has done 3 steps, but [2, 2]", PRINTED])
        self.assertEqual(self.defects("no_model", False), ["there is no model", PRINTED])

    def test_a_replay_ends_well(self):
        self.assertRegex(self.defects("fail", True)[0], r"its replay failed, with \[3\]: no history")
        self.assertRegex(self.defects("leave", True)[0], "its replay has left behind: .*/file")
        replica_faults.REPLAY_S = 0.3
        self.assertEqual(self.defects("hang", True), ["its replay hangs"])

    def test_who_ends_in_the_replay_has_ended_in_the_run(self):
        self.assertEqual(self.defects("away", True), ["report.json.1: not in the replay", PRINTED])


if __name__ == "__main__":
    unittest.main()
