#!/usr/bin/env python3
"""Runs the GPU tests and benchmarks of this folder and writes results.json and report.md.

usage: ./run [--out DIR] [--budget SECONDS] [--only REGEX] [FLAGS]

Needs a GPU with its driver and LibTorch 2.11.0 for CUDA: the torch that this Python has, --python's, or --libtorch's.
A run goes on where the last one with the same --out has ended: what has run is not run again, unless --only asks for it.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
sys.dont_write_bytecode = True

import driver  # noqa: E402  pylint: disable=wrong-import-position
import execute  # noqa: E402  pylint: disable=wrong-import-position
import libtorch  # noqa: E402  pylint: disable=wrong-import-position
import markdown  # noqa: E402  pylint: disable=wrong-import-position
import report  # noqa: E402  pylint: disable=wrong-import-position

EPILOG = ("exit codes: 0 all passed, 1 something failed or has not run, 2 a flag is wrong, or there is no LibTorch or no GPU, "
          "143 SIGTERM, 130 Ctrl-C; the report is there in all cases but 2")
# With less of the budget left nothing is begun.
LEAST_S = 10


class RunError(Exception):
    """Why nothing runs, and what to do."""


def log(text):
    print(text, file=sys.stderr, flush=True)


def parse_flags(argv):
    parser = argparse.ArgumentParser(prog="run", description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_results"), help="where results go")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                        help="for all together: what runs then is stopped, and run again by the next run")
    parser.add_argument("--only", default="", metavar="REGEX", help="programs whose name this is found in, also again")
    parser.add_argument("--limit-scale", type=float, default=1, metavar="X", help="multiplies programs' time limits")
    parser.add_argument("--again", action="store_true", help="forget what earlier runs have found")
    parser.add_argument("--libtorch", type=pathlib.Path, help="the folder with lib/libtorch_cuda.so")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--no-peers", action="store_true", help="without PyTorch's FSDP, which needs --python's torch")
    parser.add_argument("--benchmark-flags", default="", metavar="FLAGS",
                        help="for all benchmarks, such as '--turns=5' or '--device=cuda:1'")
    parser.add_argument("--dry-run", action="store_true",
                        help="without a GPU and with tiny models, of a folder whose programs have the fake device")
    return parser.parse_args(argv)


def gpus():
    """The machine's, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none found: {error}"
    said = "; ".join(done.stdout.strip().splitlines())
    return said if done.returncode == 0 else f"none found: {said}"


def describe_machine(version, manifest, dry):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"GPU, memory, driver": "none, a dry run: figures mean nothing" if dry else gpus(), "LibTorch": version,
            "date": datetime.date.today().isoformat(), "sources": manifest["sources"], "build": manifest["build"],
            "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} CPU cores, {memory:.0f} GiB"}


def check_programs(programs):
    """They may have lost their modes on their way here."""
    for file in {program["file"] for program in programs if program["kind"] != "peer"}:
        path = FOLDER / "bin" / file
        if not path.exists():
            raise RunError(f"{path} is not there: this folder is not whole. Copy it again, or pack it anew")
        if not os.access(path, os.X_OK):
            path.chmod(path.stat().st_mode | 0o755)


def choose(flags, manifest):
    try:
        chosen = [{**program, "limit_s": program["limit_s"] * flags.limit_scale} for program in manifest["programs"]
                  if re.search(flags.only, program["name"]) and not (flags.no_peers and program["kind"] == "peer")]
    except re.error as error:
        raise RunError(f"--only: {error}") from error
    if not chosen:
        raise RunError(f"no program's name has '{flags.only}' in it; there are "
                       + ", ".join(program["name"] for program in manifest["programs"]))
    return chosen


def find_libtorch(flags):
    """(version, folders of libraries)."""
    if flags.dry_run:
        return "that of the build", [str(flags.libtorch / "lib")] if flags.libtorch else []
    folder = (flags.libtorch or libtorch.folder_of(flags.python)).resolve()
    return libtorch.check(folder), libtorch.library_folders(folder)


class Results:
    """What this and earlier runs have found, on the disk after each program."""

    def __init__(self, out, machine, names):
        self.out = out
        self.machine = machine
        self.names = names  # of all programs, in order
        self.programs = {}

    def take_up(self):
        """Of an earlier run of the same sources."""
        try:
            former = json.loads((self.out / "results.json").read_text(encoding="utf-8"))
            if former["machine"]["sources"] == self.machine["sources"]:
                self.programs = {program["name"]: program for program in former["programs"]}
        except (OSError, ValueError, LookupError, TypeError):
            return
        for key in ("GPU, memory, driver", "LibTorch"):
            if self.programs and former["machine"].get(key) != self.machine[key]:
                log(f"note: earlier results in {self.out} are of another machine ({former['machine'].get(key)}); --again "
                    "forgets them")

    def has(self, name):
        return name in self.programs and self.programs[name]["outcome"] != report.CUT_OFF

    def left(self):
        return [name for name in self.names if not self.has(name)]

    def add(self, program):
        self.programs[program["name"]] = program
        self.write()

    def write(self):
        self.out.mkdir(parents=True, exist_ok=True)
        programs = [self.programs[name] for name in self.names if name in self.programs]
        results = {"machine": self.machine, "programs": programs}
        for name, text in (("results.json", json.dumps(results, indent=1) + "\n"),
                           ("report.md", markdown.render(results, self.left()))):
            # Whole at any instant: this program may be killed.
            (self.out / f"{name}.new").write_text(text, encoding="utf-8")
            os.replace(self.out / f"{name}.new", self.out / name)


def run_all(place, programs, results, deadline, stop):
    for index, program in enumerate(programs, 1):
        left = deadline - time.monotonic()
        if left < LEAST_S:
            log(f"the budget is spent; the next run with --out={results.out} has {len(programs) - index + 1} more to do")
            break
        log(f"[{index}/{len(programs)}] {program['name']}")
        result = execute.run(place, program, left, stop)
        results.add(result)
        log(f"    {result['outcome']} in {result['seconds']:.0f} s")
        for line in markdown.failures(result, lines=15):
            log(f"    {line}" if line else "")
        if stop.signal:
            break


def prepare(flags):
    """(place, the chosen programs, what is known of all)."""
    manifest = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))
    no_gpu = None if flags.dry_run else driver.why_no_gpu()
    if no_gpu:
        raise RunError(no_gpu)
    chosen = choose(flags, manifest)
    check_programs(chosen)
    version, libraries = find_libtorch(flags)
    results = Results(flags.out, describe_machine(version, manifest, flags.dry_run),
                      [program["name"] for program in manifest["programs"]])
    if not flags.again:
        results.take_up()
    return execute.Place(FOLDER, libraries, flags.python, flags.benchmark_flags, flags.dry_run), chosen, results


def main(argv):
    begin = time.monotonic()
    flags = parse_flags(argv)
    stop = execute.Stop()
    try:
        place, chosen, results = prepare(flags)
    except (RunError, libtorch.NoLibTorch) as error:
        log(f"run: {error}")
        return 2
    former = [(number, signal.signal(number, lambda number, _: stop.ask(number)))
              for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        run_all(place, [program for program in chosen if flags.only or not results.has(program["name"])], results,
                begin + flags.budget, stop)
    finally:
        for number, handler in former:
            signal.signal(number, handler)
    results.write()
    log(f"{flags.out / 'report.md'}")
    if stop.signal:
        return 128 + stop.signal
    outcomes = [results.programs.get(program["name"], {}).get("outcome") for program in chosen]
    return 0 if all(outcome in (report.PASSED, report.SKIPPED) for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
