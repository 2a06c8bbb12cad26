#!/usr/bin/env python3
"""Lets things go wrong with real jobs of the GPT example, and reports what becomes of them.

usage: bazel run //tools/chaos -- [--trials=N | --trials_each=N] [--faults=all|NAME,...] [--backend=BACKEND] [FLAGS]

Each trial starts a job, lets one fault strike at a random moment or in a random operation, and looks: whether the job
ends or survives as it should, how soon, what it says, and whether anything is left of it. Needs Linux; faults that need
namespaces are skipped where there are none.
"""
import argparse
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from typing import Any, Dict, List, Optional, Tuple

FOLDER = pathlib.Path(os.path.realpath(__file__)).parent
sys.path.insert(0, str(FOLDER))
sys.dont_write_bytecode = True

import pool  # noqa: E402  pylint: disable=wrong-import-position
import replica_faults  # noqa: E402, F401  pylint: disable=wrong-import-position,unused-import
import report  # noqa: E402  pylint: disable=wrong-import-position
from faults import FAULTS, Fault  # noqa: E402  pylint: disable=wrong-import-position
from soak import Soak  # noqa: E402  pylint: disable=wrong-import-position
from trials import Result, Runner, choose, remaining  # noqa: E402  pylint: disable=wrong-import-position

PROGRAM = "testing/gpt/testing/train_with_faults"
WRITE_EVERY_S = 5
BACKENDS = ("shared_memory", "gloo")
EPILOG = "exit codes: 0 all is as it should be, 1 there are defects, 2 a flag is wrong, 130 Ctrl-C, 143 SIGTERM"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_faults() -> str:
    lines = [f"  {fault.name:<14} {fault.about}: {fault.expect.value}"
             + ("" if len(fault.backends) > 1 else f" ({', '.join(fault.backends)} only)") for fault in FAULTS.values()]
    return "faults:\n" + "\n".join(textwrap.shorten(line, 118) if len(line) > 118 else line for line in lines)


def parse_flags(argv: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, epilog=describe_faults() + "\n\n" + EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30, help="how many, of all faults together (%(default)s)")
    parser.add_argument("--trials_each", type=int, default=0, metavar="N",
                        help="instead: so many of every fault with each backend that it is for")
    parser.add_argument("--jobs", type=int, default=6 * (os.cpu_count() or 1), metavar="N",
                        help="trials at the same time; of those that start or compute there is one for each core (%(default)s)")
    parser.add_argument("--resume", action="store_true",
                        help="keep what report.json in --out has, and make those trials of its seed that it lacks")
    parser.add_argument("--faults", default="all", help="all, or names with commas between them (%(default)s)")
    parser.add_argument("--backend", default="both", choices=[*BACKENDS, "both"], help="(%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of each job, at least 2 (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="that everything random is drawn from; printed")
    parser.add_argument("--out", type=pathlib.Path, default=None, metavar="DIR",
                        help="where report.md and report.json go (chaos_results where the command is given)")
    parser.add_argument("--program", type=pathlib.Path, default=None, help="instead of Bazel's train_with_faults")
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS",
                        help="instead of trials: one run of so many steps that restarts after each fault")
    parser.add_argument("--every", type=int, default=100, help="with --soak: steps from fault to fault (%(default)s)")
    flags = parser.parse_args(argv)
    for name, least in (("trials", 1), ("trials_each", 0), ("jobs", 1)):
        if getattr(flags, name) < least:
            parser.error(f"--{name}: expected at least {least}")
    if flags.ranks < 2:
        parser.error("--ranks: a job of less than 2 has nobody to miss it")
    unknown = [] if flags.faults == "all" else [name for name in flags.faults.split(",") if name not in FAULTS]
    if unknown:
        parser.error(f"--faults: there is no {unknown[0]}; there are {', '.join(FAULTS)}")
    return flags


def chosen_faults(flags: argparse.Namespace) -> List[Tuple[Fault, str]]:
    names = list(FAULTS) if flags.faults == "all" else flags.faults.split(",")
    backends = BACKENDS if flags.backend == "both" else (flags.backend,)
    return [(FAULTS[name], backend) for name in names for backend in backends if backend in FAULTS[name].backends]


def find_program(flags: argparse.Namespace) -> pathlib.Path:
    """Bazel starts this where its runfiles are."""
    program = flags.program or pathlib.Path(PROGRAM)
    if not program.exists():
        raise SystemExit(f"chaos: there is no {program}: ./bazelw run //tools/chaos, or --program")
    return program.resolve()


def out_folder(flags: argparse.Namespace) -> pathlib.Path:
    base = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    folder = base / (flags.out or "chaos_results")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Report:
    """Results as they come, in files that are whole at any time."""

    def __init__(self, out: pathlib.Path, about: Dict[str, str], results: List[Result]):
        self.results = results
        self._out = out
        self._about = about
        self._written = -WRITE_EVERY_S

    def add(self, result: Result) -> None:
        self.results.append(result)
        if time.monotonic() - self._written >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        data = report.to_json(self.results, self._about)
        for name, text in (("report.json", json.dumps(data, indent=1) + "\n"),
                           ("report.md", report.to_markdown(self.results, self._about))):
            (self._out / f"{name}.part").write_text(text)
            (self._out / f"{name}.part").replace(self._out / name)


def earlier(flags: argparse.Namespace, out: pathlib.Path) -> Tuple[Optional[int], List[Result]]:
    """The seed and the trials of the report with which --resume goes on, where there is one."""
    if not flags.resume or not (out / "report.json").exists():
        return None, []
    data = json.loads((out / "report.json").read_text())
    return int(data["about"]["seed"]), report.from_json(data)


def describe(result: Result) -> str:
    seconds = "" if result.detection_s is None else f" {result.detection_s:.2f} s"
    what = f"skipped: {result.skipped}" if result.skipped else "; ".join(result.defects) or "as it should be"
    return f"{result.fault}, {result.backend}, {result.detail}:{seconds} {what}"


def run_trials(flags: argparse.Namespace, program: pathlib.Path, scratch: pathlib.Path, seed: int) -> int:
    faults = chosen_faults(flags)
    if not faults:
        log(f"chaos: --backend={flags.backend} has none of these faults")
        return 2
    out = out_folder(flags)
    earlier_seed, results = earlier(flags, out)
    if earlier_seed is not None and flags.seed not in (None, earlier_seed):
        log(f"chaos: --seed={flags.seed} with --resume: {out / 'report.json'} has the seed {earlier_seed}")
        return 2
    seed = seed if earlier_seed is None else earlier_seed
    log(f"--seed={seed}")
    turns = flags.trials_each or -(-flags.trials // len(faults))
    plan = choose(faults, turns, seed)[:None if flags.trials_each else flags.trials]
    left = remaining(plan, results)
    kept = Report(out, {"seed": str(seed), "ranks": str(flags.ranks), "at the same time": str(flags.jobs),
                        "machine": f"{platform.system()} {platform.release()}, {os.cpu_count()} CPU cores",
                        "planned": f"{len(plan)} trials"}, results)
    runner = Runner(program, flags.ranks, scratch, os.cpu_count() or 1)
    runner.prepare(fault for fault, _ in faults)
    begin = time.monotonic()
    try:
        for choice, result in pool.run(lambda choice: runner.run(*choice), left, flags.jobs):
            if isinstance(result, pool.Failed):
                fault, backend, trial_seed = choice
                result = Result(fault.name, backend, trial_seed, defects=["the trial could not be made"], output=str(result))
            kept.add(result)
            log(f"[{len(kept.results)}/{len(plan)}, {time.monotonic() - begin:.0f} s] {describe(result)}")
    finally:
        kept.write()
    wrong = sum(bool(result.defects) for result in kept.results)
    log(f"{len(kept.results)} trials, {wrong} with defects: {out / 'report.md'}")
    return 1 if wrong else 0


def run_soak(flags: argparse.Namespace, program: pathlib.Path, scratch: pathlib.Path, seed: int) -> int:
    log(f"--seed={seed}")
    backends = BACKENDS if flags.backend == "both" else (flags.backend,)
    wrong = 0
    for backend in backends:
        soaked = Soak(program, backend, flags.ranks, flags.soak, flags.every, seed, scratch, log).run()
        wrong += bool(soaked.defects)
        log(f"{backend}: {soaked.steps} steps with {soaked.faults} faults in {soaked.seconds} s: "
            + ("the bits of an unbroken run" if not soaked.defects else "; ".join(soaked.defects)))
        if soaked.output:
            log(soaked.output)
    return 1 if wrong else 0


def end(*_: Any) -> None:
    """Once: a second signal, as `timeout` and terminals send it to all, must not break off what the first has begun."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main(argv: List[str]) -> int:
    flags = parse_flags(argv)
    program = find_program(flags)
    seed = random.SystemRandom().getrandbits(32) if flags.seed is None else flags.seed
    # Jobs and scratch files end with this program, however it is told to end.
    signal.signal(signal.SIGTERM, end)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="chaos.", dir=os.environ.get("TEST_TMPDIR")))
    try:
        return (run_soak if flags.soak else run_trials)(flags, program, scratch, seed)
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
