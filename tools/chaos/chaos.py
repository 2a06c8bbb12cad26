#!/usr/bin/env python3
"""Lets things go wrong with real jobs of the GPT example, and reports what becomes of them.

usage: bazel run //tools/chaos -- [--trials=N] [--faults=all|NAME,...] [--backend=shared_memory|gloo|both] [FLAGS]

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
from typing import Dict, List, Tuple

FOLDER = pathlib.Path(os.path.realpath(__file__)).parent
sys.path.insert(0, str(FOLDER))
sys.dont_write_bytecode = True

import report  # noqa: E402  pylint: disable=wrong-import-position
from faults import FAULTS, Fault  # noqa: E402  pylint: disable=wrong-import-position
from soak import Soak  # noqa: E402  pylint: disable=wrong-import-position
from trials import Result, Runner, choose  # noqa: E402  pylint: disable=wrong-import-position

PROGRAM = "examples/gpt/testing/train_with_faults"
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
    parser.add_argument("--trials", type=int, default=30, help="how many (%(default)s)")
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


def write(out: pathlib.Path, results: List[Result], about: Dict[str, str]) -> None:
    (out / "report.json").write_text(json.dumps(report.to_json(results, about), indent=1) + "\n")
    (out / "report.md").write_text(report.to_markdown(results, about))


def run_trials(flags: argparse.Namespace, program: pathlib.Path, scratch: pathlib.Path, seed: int) -> int:
    faults = chosen_faults(flags)
    if not faults:
        log(f"chaos: --backend={flags.backend} has none of these faults")
        return 2
    out = out_folder(flags)
    runner = Runner(program, flags.ranks, scratch)
    results: List[Result] = []
    begin = time.monotonic()
    plan = choose(faults, flags.trials, seed)
    for number, (fault, backend, trial_seed) in enumerate(plan, 1):
        result = runner.run(fault, backend, trial_seed)
        results.append(result)
        seconds = "" if result.detection_s is None else f" {result.detection_s:.2f} s"
        what = f"skipped: {result.skipped}" if result.skipped else "; ".join(result.defects) or "as it should be"
        log(f"[{number}/{len(plan)}, {time.monotonic() - begin:.0f} s] {fault.name}, {backend}, {result.detail}:{seconds} {what}")
        about = {"seed": str(seed), "ranks": str(flags.ranks), "machine": f"{platform.system()} {platform.release()}, "
                 f"{os.cpu_count()} CPU cores", "trials": f"{number} of {len(plan)}",
                 "took": f"{time.monotonic() - begin:.0f} s"}
        write(out, results, about)
    wrong = sum(bool(result.defects) for result in results)
    log(f"{len(results)} trials, {wrong} with defects: {out / 'report.md'}")
    return 1 if wrong else 0


def run_soak(flags: argparse.Namespace, program: pathlib.Path, scratch: pathlib.Path, seed: int) -> int:
    backends = BACKENDS if flags.backend == "both" else (flags.backend,)
    wrong = 0
    for backend in backends:
        folder = scratch / backend
        folder.mkdir()
        soaked = Soak(program, backend, flags.ranks, flags.soak, flags.every, seed, folder, log).run()
        wrong += bool(soaked.defects)
        log(f"{backend}: {soaked.steps} steps with {soaked.faults} faults in {soaked.seconds} s: "
            + ("the bits of an unbroken run" if not soaked.defects else "; ".join(soaked.defects)))
        if soaked.output:
            log(soaked.output)
    return 1 if wrong else 0


def main(argv: List[str]) -> int:
    flags = parse_flags(argv)
    program = find_program(flags)
    seed = random.SystemRandom().getrandbits(32) if flags.seed is None else flags.seed
    log(f"--seed={seed}")
    # Jobs and scratch files end with this program, however it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="chaos.", dir=os.environ.get("TEST_TMPDIR")))
    try:
        return (run_soak if flags.soak else run_trials)(flags, program, scratch, seed)
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
