#!/usr/bin/env python3
"""Our training step and PyTorch's in turns on one machine: medians, ratios, memory; the tables of docs/performance.md.

usage: ./bazelw run -c opt //benchmarks:peers [-- FLAGS]

The GPT has 25.5 million parameters (8 layers, width 512, 8 heads), fp32, fused AdamW. Each contender runs on 2 ranks of
one thread, all of them once in every round, from the same initial parameters on the same rows; losses that differ end
the run. The floor is two independent processes of our own program that train whole models at the same time. Ratios are
of runs of the same round. Memory is sampled in runs of its own.
"""
import argparse
import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile

import collectives
import contenders
import machine
import measure
import processes
import python_torch
import results
import tables

EPILOG = """\
PEERS_PYTHON=PROGRAM names a Python that has torch; else the one that runs this, else one in the cache
(XDG_CACHE_HOME, by default ~/.cache), into which pip installs it the first time.

exit codes: 0 measured, 1 something failed or losses differ, 2 a flag is wrong
"""
SHAPES = {"1x64": contenders.Shape(1, 64, steps=20, warmup=4), "4x256": contenders.Shape(4, 256, steps=6, warmup=2)}
QUICK_ROUNDS, QUICK_STEPS, QUICK_WARMUP = 2, 3, 1
BUSY_LOAD = 0.5


def log(text):
    print(text, file=sys.stderr, flush=True)


def user_path(text):
    """Relative to where the user called bazel, which runs programs elsewhere."""
    return pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), text)


def some_of(known):
    """A parser of comma-separated names."""
    def parse(text):
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no '{unknown[0]}'; choose from {','.join(known)}")
        return names
    return parse


def positive(text):
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, not '{text}'")
    return value


def parse_flags(argv):
    parser = argparse.ArgumentParser(prog="peers", description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    keys = [contender.key for contender in contenders.CONTENDERS]
    parser.add_argument("--collectives", action="store_true",
                        help="time collectives, ours and Gloo's, instead of training steps")
    parser.add_argument("--quick", action="store_true",
                        help=f"{QUICK_ROUNDS} rounds of {QUICK_STEPS} steps: whether it works, not what it measures")
    parser.add_argument("--rounds", type=positive, help="how often each contender is timed (5)")
    parser.add_argument("--steps", type=positive, help="timed steps of a run (20; 6 of 4x256)")
    parser.add_argument("--warmup", type=int, help="steps before those (4; 2 of 4x256)")
    parser.add_argument("--shapes", type=some_of(SHAPES), default=list(SHAPES), metavar="LIST",
                        help=f"rows x tokens of a rank and step ({','.join(SHAPES)})")
    parser.add_argument("--contenders", type=some_of(keys), default=keys, metavar="LIST",
                        help=f"only these ({','.join(keys)})")
    parser.add_argument("--ranks", type=positive, default=contenders.RANKS, help="of every contender (%(default)d)")
    parser.add_argument("--no-peers", action="store_true", help="without PyTorch")
    parser.add_argument("--no-install", action="store_true", help="without PyTorch where no Python has it")
    parser.add_argument("--no-memory", action="store_true", help="without the runs that sample memory")
    parser.add_argument("--deadline", type=float, default=900, metavar="SECONDS", help="of each run (%(default)g)")
    parser.add_argument("--json", type=user_path, metavar="FILE", help="everything that was measured")
    parser.add_argument("--csv", type=user_path, metavar="FILE", help="a line per run")
    parser.add_argument("--svg", type=user_path, metavar="FILE", help="the plot; with --write-table also peers.svg "
                        "beside the document")
    parser.add_argument("--write-table", dest="write", action="store_true", default=None,
                        help="replace the table in the document; done by default where bazel run is given -c opt, all "
                        "contenders take part and there is no --quick")
    parser.add_argument("--no-write-table", dest="write", action="store_false")
    parser.add_argument("--document", type=user_path, metavar="FILE",
                        help="where the table is (docs/performance.md of the source tree)")
    hidden = parser.add_argument_group("set by bazel run")
    hidden.add_argument("--train", type=pathlib.Path, required=True, metavar="PROGRAM", help="//testing/gpt:train")
    hidden.add_argument("--collectives-program", type=pathlib.Path, metavar="PROGRAM",
                        help="//benchmarks:collectives_benchmark")
    hidden.add_argument("--mode", default="", help="how they are compiled")
    args = parser.parse_args(argv)
    if args.collectives and args.ranks != contenders.RANKS:
        parser.error(f"--ranks: --collectives times {contenders.RANKS}")
    if args.warmup is not None and args.warmup < 0:
        parser.error("--warmup: expected a number from 0")
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else 5)
    source_tree = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if args.document is None and source_tree:
        args.document = pathlib.Path(source_tree, "docs/performance.md")
    if args.write and args.document is None:
        parser.error("--write-table: say which document with --document=FILE, or run this by bazel run")
    return args


def shapes(args):
    for shape in (SHAPES[key] for key in args.shapes):
        steps = args.steps or (QUICK_STEPS if args.quick else shape.steps)
        warmup = args.warmup if args.warmup is not None else QUICK_WARMUP if args.quick else shape.warmup
        yield contenders.Shape(shape.batch, shape.seq, steps, warmup)


def find_python(args):
    """None where there are to be no peers, or cannot be any."""
    if args.no_peers:
        log("without PyTorch's DDP, FSDP1 and FSDP2: --no-peers")
        return None
    try:
        python = python_torch.find(log, may_install=not args.no_install)
    except python_torch.NoTorch as error:
        log(f"WITHOUT PyTorch's DDP, FSDP1 and FSDP2: {error}")
        return None
    log(f"PyTorch's part is run by {python}")
    return python


def take_cores(ranks):
    """The cores that this process and what it starts run on from now on: as many as there are ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        log(f"only {len(cores)} of {ranks} cores for {ranks} ranks: ratios will be other than on {ranks}")
    os.sched_setaffinity(0, cores[:ranks])
    return cores[:ranks]


def why_not_write(args, complete):
    """"" where the document is to be changed."""
    if args.write is not None:
        return "" if args.write else "--no-write-table"
    reasons = [(args.document is None, "bazel run did not start this"), (args.quick, "--quick"),
               (not args.mode.startswith("opt"), "not compiled with -c opt"),
               (not complete, "not everything was measured")]
    return next((reason for holds, reason in reasons if holds), "")


def check_document(args, name):
    """Before anything is measured, that the table can be written afterwards."""
    if args.write is False or args.document is None:
        return
    try:
        tables.replace_between(args.document.read_text(encoding="utf-8"), name, "")
    except (OSError, ValueError) as error:
        raise processes.RunError(f"{args.document}: {error}") from error


def write(path, text):
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise processes.RunError(f"writing {path}: {error.strerror}") from error
    log(f"wrote {path}")


def write_table(args, name, content, complete):
    reason = why_not_write(args, complete)
    if reason:
        log(f"{args.document or 'docs/performance.md'} stays as it is ({reason})")
        return False
    document = args.document.read_text(encoding="utf-8")
    write(args.document, tables.replace_between(document, name, content))
    return True


def run_train_steps(args, python, folder, described):
    chosen = [contenders.with_ranks(contender, args.ranks) for contender in contenders.CONTENDERS
              if contender.key in args.contenders and (python or not contender.python)]
    if not chosen:
        raise processes.RunError("no contender is left: --contenders names only PyTorch's, and no Python has torch")
    measured = measure.Measured(chosen, list(shapes(args)))
    check_document(args, "peers")
    programs = contenders.Programs(args.train.absolute(), python)
    measure.TrainSteps(programs, measured, args.rounds, args.deadline, folder).measure(not args.no_memory)
    print(results.train_text(measured, described, args.rounds, aligned=True), flush=True)
    if args.json:
        write(args.json, results.as_json(measured, described, args.rounds))
    if args.csv:
        write(args.csv, results.as_csv(measured))
    picture = results.plot_text(measured, described, args.rounds)
    if args.svg:
        write(args.svg, picture)
    complete = len(chosen) == len(contenders.CONTENDERS) and len(measured.shapes) == len(SHAPES) and \
        not args.no_memory and args.ranks == contenders.RANKS
    content = results.train_text(measured, described, args.rounds) + \
        "\n\n![Step times and memory of all contenders](peers.svg)"
    if write_table(args, "peers", content, complete):
        write(args.document.parent / "peers.svg", picture)


def run_collectives(args, python, folder, described):
    if args.collectives_program is None:
        raise processes.RunError("--collectives needs --collectives-program=PROGRAM, which bazel run sets")
    check_document(args, "collectives")
    names = ["ours", "python"] if python else ["ours"]
    progress = measure.Progress(names * args.rounds)
    rounds = []

    def run(commands, parse):
        where = pathlib.Path(tempfile.mkdtemp(dir=folder))
        with processes.Group(commands, where) as group:
            group.wait(args.deadline)
            found = parse(group.stdout(0))
        rounds[-1].update(found)
        return f"{len(found)} timings"

    for number in range(1, args.rounds + 1):
        rounds.append({})
        progress.run("ours", f"round {number} of {args.rounds}, ours", lambda: run(
            [collectives.benchmark_command(args.collectives_program.absolute(), args.quick)],
            collectives.parse_benchmark))
        if python:
            progress.run("python", f"round {number} of {args.rounds}, Gloo from Python", lambda: run(
                collectives.peer_commands(python), collectives.parse_peer))
    if not any(rounds):
        raise processes.RunError("collectives_benchmark reported no collective that this program knows by name")
    rows = collectives.table(rounds)
    head = f"{machine.sentence(described)}. {results.of_rounds(args.rounds, 'in brackets')}. \"Times faster\": than " \
        f"{collectives.gloo_of(rounds) or 'Gloo'} in the same round."
    print(f"{head}\n\n{tables.markdown(rows, aligned=True)}", flush=True)
    if args.json:
        write(args.json, json.dumps({"machine": described, "rounds": collectives.as_json(rounds)}, indent=1) + "\n")
    if args.csv:
        write(args.csv, collectives.as_csv(rounds))
    write_table(args, "collectives", f"{head}\n\n{tables.markdown(rows)}", python is not None)


def main(argv):
    if sys.version_info < (3, 9):
        log(f"peers: needs Python 3.9 or later, {sys.executable} is {sys.version.split()[0]}")
        return 1
    args = parse_flags(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="peers."))
        try:
            wants_python = args.collectives or any(
                contender.python for contender in contenders.CONTENDERS if contender.key in args.contenders)
            python = find_python(args) if wants_python else None
            described = machine.describe(args.train, args.mode, take_cores(args.ranks))
            if described["load_before"] > BUSY_LOAD:
                log(f"this machine is busy (load {described['load_before']}): only ratios can be of use")
            (run_collectives if args.collectives else run_train_steps)(args, python, folder, described)
        except processes.RunError as error:
            log(f"peers: {error}")
            return 1
        except KeyboardInterrupt:
            log("peers: interrupted; nothing was written")
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
