#!/usr/bin/env python3
"""Trains with //testing/gpt:train, and fails when its ranks together take more memory than a limit.

usage: train_within_memory.py --limit=600MiB [options] -- FLAGS...       (FLAGS: those of the program, see its --help)

    ./bazelw run //testing/gpt:train_within_memory -- --limit=300MiB --over-baseline -- \\
        --layers=48 --seq=16 --batch=1 --steps=10 --offload=ssd --memory-budget=40MiB

The memory of all its processes is sampled 20 times a second, and the run is killed when that is more. The sum of PSS
counts each page once, however many ranks share it, and nothing of the system's cache of files.

Exits with 0 when the run has ended well within the limit, otherwise with 1.
"""
import argparse
import ctypes
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
import typing

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks/peers"))
import memory  # noqa: E402
import processes  # noqa: E402

INTERVAL_SECONDS = 0.05
# How long a killed process may take to vanish.
DEADLINE_SECONDS = 30.0
PR_SET_CHILD_SUBREAPER = 36
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# Over the flags of the run: next to no parameters and activations, and no files.
TINY_RUN = ["--layers=1", "--dim=8", "--heads=1", "--seq=8", "--vocab=256", "--batch=1", "--warmup=0", "--steps=3",
            "--json=", "--trace=", "--init=", "--save-init="]


def parse_bytes(text):
    """8GiB, 512MiB, 64KiB, 4096."""
    number, unit = (text[:-3], text[-3:]) if text[-3:] in UNITS else (text, "")
    if not number.isascii() or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, such as 8GiB, 512MiB, 64KiB or 4096")
    return int(number) * UNITS.get(unit, 1)


def in_mib(count):
    return f"{count / (1 << 20):.1f} MiB"


def adopt_orphans():
    """Descendants whose parents end become children of this process, not of init."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants():
    """Of this process, as far as they have not ended."""
    return processes.with_descendants([os.getpid()]).keys() - {os.getpid()}


def memory_of_descendants():
    """PSS, and what the kernel keeps out of it."""
    samples = [memory.take_sample(pid, ranks=1) for pid in descendants()]
    return int(sum(sample.pss for sample in samples if sample))


class Outcome(typing.NamedTuple):
    """Of a run."""
    peak: int  # the largest sum of PSS in bytes, by the samples
    exceeded: bool
    exit_code: typing.Optional[int]  # negative: the signal that has killed it
    seconds: float

    def ended_well(self):
        return not self.exceeded and self.exit_code == 0

    def describe(self, limit):
        text = f"peak {in_mib(self.peak)} of PSS"
        if limit is not None:
            text += f", of {in_mib(limit)} allowed"
        if self.exceeded:
            return f"{text}; TOO MUCH: the run was killed after {self.seconds:.1f} s"
        if self.exit_code != 0:
            return f"{text}; the run FAILED by itself with exit code {self.exit_code} after {self.seconds:.1f} s"
        return f"{text}; the run ended well after {self.seconds:.1f} s"


def run_within(command, limit, stdout=None):
    """Runs a command to its end. `limit`: None: any memory.

    This process has no other children meanwhile.
    """
    adopt_orphans()
    begin = time.monotonic()
    # A session of its own: a terminal's Ctrl-C is for this process, which ends the run.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, start_new_session=True)
    peak, exceeded = 0, False
    try:
        end = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(end, select.POLLIN)
            while True:
                peak = max(peak, memory_of_descendants())
                exceeded = limit is not None and peak > limit
                if exceeded or poll.poll(INTERVAL_SECONDS * 1000):
                    break
        finally:
            os.close(end)
    finally:
        kill_descendants()
        process.wait()
    return Outcome(peak, exceeded, process.returncode, time.monotonic() - begin)


def kill_descendants():
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        pids = descendants()
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(INTERVAL_SECONDS / 10)


def say(text):
    print(f"train_within_memory: {text}", flush=True)


def baseline_of(command):
    """What next to no model takes: LibTorch itself, and the channels between ranks."""
    outcome = run_within(command + TINY_RUN, limit=None, stdout=subprocess.DEVNULL)
    say(f"baseline: {outcome.describe(None)}")
    if not outcome.ended_well():
        sys.exit(1)
    return outcome.peak


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument("--limit", type=parse_bytes, required=True, help="of all ranks together: 8GiB, 512MiB, ...")
    parser.add_argument("--over-baseline", action="store_true",
                        help="the limit is on top of what a run of next to no model takes, which is measured first")
    parser.add_argument("--train", default=REPOSITORY / "bazel-bin/testing/gpt/train",
                        help="the program; default: %(default)s")
    parser.add_argument("--report", help="write the result to this file as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="of the program, behind --")
    return parser.parse_args(argv)


def main(argv):
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of run_within(), which ends the run
    command = [os.path.abspath(args.train), *args.flags]
    if not os.access(command[0], os.X_OK):
        sys.exit(f"no program {command[0]}: build //testing/gpt:train, or say where it is by --train")
    baseline = baseline_of(command) if args.over_baseline else 0
    limit = baseline + args.limit
    say(f"limit {in_mib(limit)}")
    outcome = run_within(command, limit)
    say(outcome.describe(limit))
    if args.report:
        report = {**outcome._asdict(), "limit": limit, "baseline": baseline, "ended_well": outcome.ended_well()}
        # Under `bazel run` the path is the user's.
        path = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), args.report)
        path.write_text(json.dumps(report) + "\n", encoding="utf-8")
    return 0 if outcome.ended_well() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
