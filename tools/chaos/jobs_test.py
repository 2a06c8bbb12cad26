#!/usr/bin/env python3
"""Tests of jobs.py, with shell scripts for programs."""
import os
import pathlib
import resource
import signal
import socket
import sys
import tempfile
import unittest

import jobs

# As the program does it: starts itself for each rank.
LAUNCHES = """#!/bin/sh
if [ -z "$RANK" ]; then
  RANK=0 "$0" & RANK=1 "$0" & wait
  exit
fi
echo "rank $RANK began"
exec sleep 600
"""
LISTENS = """
import socket, sys, time
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
print("port", s.getsockname()[1], flush=True)
time.sleep(600)
"""


class JobTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def job(self, script, **changes):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        program = folder / "program"
        program.write_text(script)
        program.chmod(0o755)
        job = jobs.Job(jobs.Setup(program, ["--flag"], **changes), folder)
        self.addCleanup(job.kill)
        return job

    def test_finds_and_kills_ranks(self):
        job = self.job(LAUNCHES)
        self.assertIsNotNone(job.await_text("rank 1 began", 20))
        self.assertIsNotNone(job.await_text("rank 0 began", 20))
        self.assertEqual(sorted(job.ranks()), [0, 1])
        self.assertEqual(sorted(job.family()), sorted(jobs.marked(job.mark)))
        jobs.signal_rank(job, 1, signal.SIGKILL)
        job.processes[0].kill()
        self.assertTrue(job.await_end(20))
        self.assertEqual(job.codes(), [-signal.SIGKILL])
        left = job.left(seconds=0.1)
        self.assertEqual(len(left), 1, left)
        self.assertIn("process", left[0])
        job.kill()
        self.assertEqual(job.left(), [])

    def test_knows_ranks_of_replicas(self):
        job = self.job(LAUNCHES, environment={"FSDP_REPLICA": "4", "TORCHELASTIC_RESTART_COUNT": "2"}, replicas=5)
        self.assertIsNotNone(job.await_text("rank 1 began", 20))
        self.assertIsNotNone(job.await_text("rank 0 began", 20))
        self.assertEqual(sorted((one.rank, one.replica, one.restart) for one in job.members()), [(0, 4, 2), (1, 4, 2)])

    def test_ranks_are_started_one_by_one(self):
        job = self.job("#!/bin/sh\necho \"$RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT, $LOCAL_RANK, $1 $2\"\n",
                       ranks=3, one_by_one=True, ranks_per_host=2)
        self.assertTrue(job.await_end(20))
        self.assertIn(f"2 of 3 at 127.0.0.1:{job.port}, 0, --flag \n", job.text())

    def test_the_program_starts_its_ranks(self):
        job = self.job("#!/bin/sh\necho \"$@ $RANK\"\n", ranks=3)
        self.assertTrue(job.await_end(20))
        self.assertEqual(job.text(), "--flag --ranks=3 \n")
        job = self.job("#!/bin/sh\necho \"$@\"\n", ranks=3, replicas=2)
        self.assertTrue(job.await_end(20))
        self.assertEqual(job.text(), "--flag --ranks=3 --replicas=2\n")

    def test_limits_and_ignored_signals_come_before_the_program(self):
        job = self.job("#!/bin/sh\nulimit -n\nkill -PIPE $$\necho on\n", limits={resource.RLIMIT_NOFILE: 77},
                       ignored_signals=(signal.SIGPIPE,))
        self.assertTrue(job.await_end(20))
        self.assertEqual(job.text(), "77\non\n")
        job = self.job("#!/bin/sh\nkill -PIPE $$\necho on\n")
        self.assertTrue(job.await_end(20))
        self.assertEqual(job.codes(), [-signal.SIGPIPE])

    def test_sees_what_is_left(self):
        job = self.job(f"#!{sys.executable}\n{LISTENS}")
        match = job.await_text(r"port (\d+)", 20)
        self.assertIsNotNone(match)
        self.assertEqual(job.note_ports(), {int(match[1])})
        (job.temporary / "file").touch()
        left = job.left(seconds=0.1)
        self.assertIn(f"port {match[1]}", left)
        self.assertIn(str(job.temporary / "file"), left)
        job.kill()
        (job.temporary / "file").unlink()
        self.assertEqual(job.left(), [])
        # A port of others is none of the job's, also where the job has had it before.
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(match[1])))
            listener.listen()
            self.assertEqual(job.left(seconds=0.1), [])

    def test_shared_memory_is_of_the_job_that_has_left_it(self):
        if not jobs.has_own_shared_memory():
            self.skipTest("no mount namespaces")
        name = f"chaos_test.{os.getpid()}"
        careless, other = self.job(f"#!/bin/sh\ntouch /dev/shm/{name}\n"), self.job("#!/bin/sh\n")
        for job in (careless, other):
            self.assertTrue(job.await_end(20))
            self.assertEqual(job.codes(), [0])
        self.assertEqual(careless.left(seconds=0.1), [str(careless.folder / "shm" / name)])
        self.assertEqual(other.left(seconds=0.1), [])
        self.assertFalse(os.path.exists(f"/dev/shm/{name}"))

    def test_what_ends_says_nothing_more(self):
        job = self.job("#!/bin/sh\necho over\nexit 3\n")
        self.assertIsNone(job.await_text("never", 20))
        self.assertIsNotNone(job.await_text("over", 20))
        self.assertEqual(job.codes(), [3])


if __name__ == "__main__":
    unittest.main()
