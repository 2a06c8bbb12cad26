"""One program of the folder: its command, environment, time limit and what it reported."""
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import report

TAIL = 8000
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
# What it says where it cannot work, whatever the program does.
SANITIZER_CANNOT = ("Device not supported", "Unable to find injection library")


def find_sanitizer():
    return next(filter(None, map(shutil.which, SANITIZERS)), None)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _kill(process):
    """It and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Stop:
    """The wish that a run ends, told by a signal's handler: the program that runs is killed."""

    def __init__(self):
        self.signal = None
        self._process = None

    def ask(self, number):
        self.signal = self.signal or number
        if self._process is not None:
            _kill(self._process)

    def watch(self, process):
        self._process = process
        if self.signal and process is not None:  # asked for while it was started
            _kill(process)


class Place:
    """Where programs are and what they are run with."""

    def __init__(self, folder, libraries, python, benchmark_flags="", dry=False):
        self.folder = folder
        self.libraries = libraries  # LibTorch's folders
        self.python = python        # has torch
        self.benchmark_flags = benchmark_flags.split()
        self.dry = dry

    def command(self, program, written):
        flags = program["flags"] + (program["dry_flags"] if self.dry else [])
        if program["kind"] == "peer":
            return [self.python, str(self.folder / program["file"]), *flags]
        path = str(self.folder / "bin" / program["file"])
        if program["kind"] == "test":
            return [path, f"--gtest_output=json:{written}", *flags]
        if program["kind"] == "sanitizer":
            return [find_sanitizer() or SANITIZERS[0], "--tool=memcheck", "--error-exitcode=9", "--print-limit=10", path,
                    f"--gtest_output=json:{written}", *flags]
        flags += self.benchmark_flags if program["takes_flags"] else []
        return [path, f"--benchmark_out={written}", "--benchmark_out_format=json", *flags]

    def environment(self, program, scratch):
        if program["kind"] == "peer":  # whose torch finds its libraries itself
            return {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port())}
        former = os.environ.get("LD_LIBRARY_PATH")
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(self.libraries + ([former] if former else [])),
                "TEST_TMPDIR": scratch}


def _run_until(command, output, limit, stop, **options):
    """The process, of which nothing is left, and how it came to its end: by itself, "late" or "stopped"."""
    with open(output, "wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                   start_new_session=True, **options)
    stop.watch(process)
    late = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        stop.watch(None)
        _kill(process)
        process.wait()
    return process, "stopped" if stop.signal else "late" if late else "by itself"


def _cases(program, written, output):
    """What the program reported; of one that ended early, what is known."""
    try:
        if program["kind"] == "peer":
            return report.peer_cases(output, program["name"])
        text = written.read_text(encoding="utf-8")
        return report.benchmarks(text) if program["kind"] == "benchmark" else report.test_cases(text)
    except (OSError, ValueError, LookupError):
        return [] if program["kind"] in ("peer", "benchmark") else report.test_cases_of_output(output)


def _result(program, outcome, **changes):
    return {"name": program["name"], "kind": program["kind"], "outcome": outcome, "seconds": 0, "exit_code": 0,
            "cases": [], "output_tail": "", **changes}


def run(place, program, left, stop):
    """What is known of it; `left`: seconds of the budget."""
    if program["kind"] == "sanitizer" and (place.dry or find_sanitizer() is None):
        return _result(program, report.SKIPPED, output_tail="a dry run, or no compute-sanitizer on this machine")
    with tempfile.TemporaryDirectory(prefix="gpu_suite.") as scratch:
        written, output = pathlib.Path(scratch, "report.json"), pathlib.Path(scratch, "output")
        begin = time.monotonic()
        try:
            process, end = _run_until(place.command(program, written), output, min(program["limit_s"], left), stop,
                                      cwd=scratch, env=place.environment(program, scratch))
        except OSError as error:
            return _result(program, report.FAILED, exit_code=127, output_tail=f"does not start: {error}")
        said = output.read_text(encoding="utf-8", errors="replace")
        cases = _cases(program, written, said)
        if end == "stopped" or (end == "late" and left < program["limit_s"]):
            outcome = report.CUT_OFF
        else:
            outcome = report.outcome_of(cases, process.returncode, timed_out=end == "late")
        if program["kind"] == "sanitizer" and any(text in said for text in SANITIZER_CANNOT):
            outcome, cases = report.SKIPPED, []
        return _result(program, outcome, seconds=time.monotonic() - begin, exit_code=process.returncode, cases=cases,
                       output_tail=said[-TAIL:])
