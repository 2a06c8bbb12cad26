#!/usr/bin/env python3
"""Mutation testing: changes one place of a source at a time and sees whether a test fails.

usage: tools/mutation/mutate.py [options] [FILE...]

FILEs are those of tools/mutation/targets.json, which names the tests of each, the fastest likely killer first; all of
them without FILE. Works in a git worktree of its own (--worktree, made at HEAD when it is not there), so that your tree
stays as it is. Results go to --results as they come, and a later run goes on from there. Prints every survivor as a
diff at the end: add the test that it lacks, or a line to tools/mutation/equivalent.txt that says why no test can tell.
"""

import argparse
import difflib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import mutants  # pylint: disable=wrong-import-position

HERE = pathlib.Path(__file__).resolve().parent
KILLED, SURVIVED, NOT_COMPILED = "killed", "survived", "did not compile"
# Bazel's exit codes: a build failed, a test failed.
BUILD_FAILED, TEST_FAILED = 1, 3


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--count", type=int, default=50, help="mutants of each file at most (default 50)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--budget", type=float, default=60, help="minutes after which no mutant is begun (default 60)")
    parser.add_argument("--results", default="mutation_results.jsonl", help="one line of JSON for each mutant")
    parser.add_argument("--worktree", default="/tmp/mutation_worktree")
    parser.add_argument("--bazel", default="./bazelw", help="and its startup options, to be run in the worktree")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for a test; one that takes longer has failed")
    parser.add_argument("--targets", default=str(HERE / "targets.json"))
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    return parser.parse_args(arguments)


def choose(found, count, seed):
    """`count` of `found`, spread over the kinds of change: always the same ones, and more when `count` grows."""
    generator = random.Random(seed)
    kinds = {}
    for mutant in found:
        kinds.setdefault(mutant.what, []).append(mutant)
    for of_kind in kinds.values():
        generator.shuffle(of_kind)
    queues = [kinds[what] for what in sorted(kinds)]
    chosen = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop())
    return chosen


def diff(source, mutant):
    changed = mutant.apply(source)
    return "".join(difflib.unified_diff(source.splitlines(True), changed.splitlines(True), mutant.path, mutant.path, n=2))


class Runner:
    """Builds and tests in the worktree."""

    def __init__(self, options):
        self.root = pathlib.Path(options.worktree)
        self.bazel = options.bazel.split()
        self.timeout = options.timeout

    def prepare(self):
        if not self.root.exists():
            subprocess.run(["git", "worktree", "add", "--detach", str(self.root), "HEAD"], check=True, cwd=HERE)
        subprocess.run(["git", "checkout", "-q", "--", "."], check=True, cwd=self.root)

    def read(self, path):
        return (self.root / path).read_text(encoding="utf-8")

    def test(self, path, test):
        """Bazel's exit code. What is mutated is compiled fast and without warnings."""
        flag = f"--per_file_copt=^{re.escape(path)}$@-w,-O0,-g0"
        command = [*self.bazel, "test", flag, f"--test_timeout={self.timeout}", "--jobs=2", "--local_test_jobs=1",
                   "--test_output=summary", "--noshow_progress", test]
        return subprocess.run(command, cwd=self.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              check=False).returncode

    def run(self, mutant, tests):
        """(outcome, the test that has killed it)."""
        source = self.read(mutant.path)
        target = self.root / mutant.path
        try:
            target.write_text(mutant.apply(source), encoding="utf-8")
            for test in tests:
                code = self.test(mutant.path, test)
                if code == TEST_FAILED:
                    return KILLED, test
                if code == BUILD_FAILED:
                    return NOT_COMPILED, ""
                if code != 0:
                    raise RuntimeError(f"{' '.join(self.bazel)} test {test} ended with {code}")
            return SURVIVED, ""
        finally:
            target.write_text(source, encoding="utf-8")


def read_results(path):
    """key -> result, of the runs before."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return {result["key"]: result for result in map(json.loads, file)}


def read_equivalents(path):
    """key -> why no test can tell the mutant from the source."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        lines = [line.split(maxsplit=1) for line in file if line.strip() and not line.startswith("#")]
    return {key: why.strip() for key, why in lines}


def report(results, equivalents, out):
    """Of one dictionary for each mutant; survivors without an explanation come as diffs."""
    unexplained = 0
    for path in sorted({result["path"] for result in results}):
        of_path = [result for result in results if result["path"] == path]
        counts = {outcome: sum(result["outcome"] == outcome for result in of_path)
                  for outcome in (KILLED, SURVIVED, NOT_COMPILED)}
        same = sum(result["outcome"] == SURVIVED and result["key"] in equivalents for result in of_path)
        compiled = counts[KILLED] + counts[SURVIVED] - same
        share = f"{100 * counts[KILLED] / compiled:.1f} %" if compiled else "-"
        out.write(f"{path}: {counts[KILLED]} of {compiled} killed ({share}), {same} more are equivalent, "
                  f"{counts[NOT_COMPILED]} did not compile\n")
    for result in results:
        if result["outcome"] == SURVIVED and result["key"] not in equivalents:
            unexplained += 1
            out.write(f"\nsurvived: {result['key']}, {result['what']}\n{result['diff']}")
    return unexplained


def main(arguments):
    options = parse_arguments(arguments)
    with open(options.targets, encoding="utf-8") as file:
        targets = json.load(file)
    unknown = [path for path in options.files if path not in targets]
    if unknown:
        print(f"{options.targets} names no tests for {', '.join(unknown)}", file=sys.stderr)
        return 2
    runner = Runner(options)
    runner.prepare()
    known = read_results(options.results)
    deadline = time.monotonic() + 60 * options.budget
    results = []
    for path in options.files or targets:
        source = runner.read(path)
        chosen = choose(mutants.mutants(path, source), options.count, options.seed)
        if options.list:
            for mutant in chosen:
                print(f"{mutant.key} {path}:{mutant.line}: {mutant.what}")
            continue
        todo = [mutant for mutant in chosen if mutant.key not in known]
        if todo and time.monotonic() < deadline:
            for test in targets[path]:
                if runner.test(path, test) != 0:
                    print(f"{test} does not pass without any change", file=sys.stderr)
                    return 2
        for number, mutant in enumerate(todo, 1):
            if time.monotonic() >= deadline:
                print(f"{path}: out of time, {len(todo) - number + 1} mutants are left", file=sys.stderr)
                break
            begin = time.monotonic()
            try:
                outcome, killer = runner.run(mutant, targets[path])
            except KeyboardInterrupt:
                deadline = 0  # what is known is reported
                break
            known[mutant.key] = {"key": mutant.key, "path": path, "line": mutant.line, "what": mutant.what,
                                 "outcome": outcome, "killer": killer, "diff": diff(source, mutant)}
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(known[mutant.key]) + "\n")
            print(f"[{number}/{len(todo)}] {path}:{mutant.line}: {mutant.what}: {outcome} {killer} "
                  f"({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
        results += [known[mutant.key] for mutant in chosen if mutant.key in known]
    if options.list:
        return 0
    return 1 if report(results, read_equivalents(HERE / "equivalent.txt"), sys.stdout) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
