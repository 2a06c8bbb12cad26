#!/usr/bin/env python3
"""A fixed batch of trials of real jobs, and a short soak; the program is this test's runfile."""
import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import chaos
import jobs

# The quick ones: none that has to wait for a deadline.
FAULTS = "kill,step_segv,step_throw,step_exit,store_dead,kill_launcher,stop_continue,disk_full,file_size,shm_full"


class ChaosTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(scratch.cleanup)
        self.out = pathlib.Path(scratch.name)

    def main(self, *flags):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = chaos.main([*flags, f"--out={self.out}"])
        return code, said.getvalue()

    def test_nothing_is_wrong_and_nothing_is_left(self):
        code, said = self.main("--trials=8", f"--faults={FAULTS}", "--seed=11")
        self.assertEqual(code, 0, said)
        before = json.loads((self.out / "report.json").read_text())["trials"]
        code, said = self.main("--trials=10", f"--faults={FAULTS}", "--resume")
        self.assertEqual(code, 0, said)
        self.assertIn("--seed=11\n", said)
        data = json.loads((self.out / "report.json").read_text())
        self.assertEqual(len(data["trials"]), 10)
        self.assertEqual(data["trials"][:8], before)
        self.assertEqual(len({(trial["fault"], trial["backend"]) for trial in data["trials"]}), 10)
        for trial in data["trials"]:
            self.assertTrue(trial["skipped"] or trial["detection_s"] is not None, trial)
        self.assertIn("## Defects\n\nNone.\n", (self.out / "report.md").read_text())

    def test_replicas_outlive_each_other(self):
        code, said = self.main("--trials_each=1", "--faults=replica_kill,replica_join,keeper", "--backend=gloo", "--seed=13")
        self.assertEqual(code, 0, said)
        data = json.loads((self.out / "report.json").read_text())
        self.assertEqual({trial["fault"]: [code == 0 for code in trial["codes"]] for trial in data["trials"]},
                         {"replica_kill": [True], "replica_join": [True], "keeper": [False]})

    def test_a_run_that_restarts_ends_with_the_bits_of_an_unbroken_one(self):
        code, said = self.main("--soak=120", "--every=30", "--backend=gloo", "--seed=12")
        self.assertEqual(code, 0, said)
        self.assertIn("the bits of an unbroken run", said)

    def test_who_ends_it_ends_its_jobs(self):
        program = self.out / "program"
        program.write_text(f"#!/bin/sh\ntouch {self.out}/begun\nexec sleep 600\n")
        program.chmod(0o755)
        process = subprocess.Popen([sys.executable, chaos.__file__, "--faults=kill", f"--program={program}", f"--out={self.out}"],
                                   stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "OF_TEST": str(self.out)})
        while not (self.out / "begun").exists():
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)  # the trials, too, to which the program passes it on
        self.assertEqual(process.wait(), 143)
        of_jobs = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()
                   and jobs.environment_of(int(pid)).get("OF_TEST") == str(self.out) and jobs.is_alive(int(pid))]
        self.assertEqual(of_jobs, [])

    def test_wrong_flags_are_refused(self):
        for flags in (["--faults=flood"], ["--ranks=1"], ["--backend=pigeons"], ["--jobs=0"], ["--trials=0"]):
            with self.assertRaises(SystemExit) as raised:
                self.main(*flags)
            self.assertEqual(raised.exception.code, 2)
        self.assertEqual(self.main("--faults=partition", "--backend=shared_memory")[0], 2)


if __name__ == "__main__":
    unittest.main()
