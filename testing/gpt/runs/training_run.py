"""testing/gpt/train as a process, for tests that kill it; the program is their runfile."""
import ctypes
import hashlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

PROGRAM = "testing/gpt/train"
PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 120  # of any one wait


def adopt_orphans():
    """Processes that a killed launcher leaves become children of this one."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER)")


def free_port(but):
    """One that nobody uses now, and another one than `but`."""
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        if port != but:
            return port


def committed_steps(folder):
    """The steps that there are checkpoints of, rising."""
    names = os.listdir(folder) if folder.exists() else []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))


def sums(checkpoint):
    """The SHA-256 of its files, but of those of ranks, which have random states that no seed is given for, and of the
    manifest, which has their checksums."""
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(checkpoint.rglob("*"))
            if path.is_file() and path.parent.name != "ranks" and path.name != "manifest.json"}


class Run:
    """A started program, whose output a thread reads."""

    def __init__(self, flags, environment=None, program=PROGRAM):
        self.process = subprocess.Popen([program, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        env=None if environment is None else {**os.environ, **environment})
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.output += line

    def ended(self):
        return self.process.poll() is not None

    def ranks(self):
        """Their processes, which are groups of their own; by rank, as far as they have been started."""
        pid = self.process.pid
        try:
            return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def kill(self, victim):
        """All of it, or one rank, after which the others end by themselves."""
        ranks = self.ranks()
        pids = [self.process.pid, *ranks] if victim is None else ranks[victim:victim + 1]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # with its launcher
        return len(pids) > 0

    def wait(self, adopted=True):
        """Until nothing of it is left: what it has locked is free then. `adopted`: nor of its orphans."""
        code = self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        while adopted:
            try:
                os.waitpid(-1, 0)  # orphans are this process's children
            except ChildProcessError:
                break
        return code


class RunTest(unittest.TestCase):
    """Has a folder of its own, and the orphans of its runs."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        adopt_orphans()

    def await_that(self, condition, run):
        """While `run` goes on."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            self.assertFalse(run.ended(), run.output)
            self.assertLess(time.monotonic(), deadline, run.output)
            time.sleep(0.0005)
