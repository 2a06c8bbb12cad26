#!/usr/bin/env python3
"""Mutation testing: changes one place of a source at a time and sees whether a test fails.

usage: tools/mutation/mutate.py [options] [FILE...]

FILEs are those of tools/mutation/targets.json, which names the tests of each, the fastest likely killer first; all of
them without FILE. Bazel builds the tests once and tells its commands; each mutant is compiled and linked by the same
commands in a folder of its own, so that the tree stays as it is. While it runs, build nothing with the same output base
and change no source. Results go to --results as they come, and a later run goes on from there. Prints every survivor
as a diff at the end: add the test that it lacks, or a line to tools/mutation/equivalent.txt that says why no test can
tell.
"""

import argparse
import concurrent.futures
import difflib
import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import mutants  # pylint: disable=wrong-import-position

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KILLED, SURVIVED, NOT_COMPILED = "killed", "survived", "did not compile"


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--count", type=int, default=50, help="mutants of each file at most (default 50)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--budget", type=float, default=60, help="minutes after which no mutant is begun (default 60)")
    parser.add_argument("--results", default="mutation_results.jsonl", help="one line of JSON for each mutant")
    parser.add_argument("--retry", action="store_true", help="what has survived without an explanation is tried again")
    parser.add_argument("--bazel", default="./bazelw", help="and its startup options")
    parser.add_argument("--prefix", default="", help="what compilers, linkers and tests are run by, such as nice")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
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


class WrongTargets(Exception):
    """Tests are named for a source that they have nothing of."""


class Commands:
    """How Bazel compiles `paths` and links `tests`; it has built what that takes."""

    def __init__(self, bazel, paths, tests):
        def run(*arguments):
            return subprocess.run([*bazel, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout

        run("build", "--noshow_progress", *tests)
        sources = "|".join(path.replace(".", "[.]") for path in paths)
        all_tests = " + ".join(tests)
        query = (f'mnemonic("CppCompile", inputs("({sources})", deps({all_tests}))) + '
                 f'mnemonic("CppLink", {all_tests})')
        actions = json.loads(run("aquery", "--output=jsonproto", query))["actions"]
        self.root = pathlib.Path(run("info", "execution_root").decode().strip())
        self._compile = {}
        self._link = {}
        for action in actions:
            # With the file of parameters as well, which has the same again.
            arguments = [argument for argument in action.get("arguments", []) if not argument.startswith("@")]
            if "-c" in arguments:
                self._compile.setdefault(arguments[arguments.index("-c") + 1], arguments)
            elif "-o" in arguments:
                self._link[arguments[arguments.index("-o") + 1]] = arguments

    def compile(self, path, source, out):
        """With Bazel's precompiled header, which asks for Bazel's flags, and without warnings."""
        arguments = list(self._compile[path])
        arguments[arguments.index("-c") + 1] = str(source)
        arguments[arguments.index("-o") + 1] = str(out)
        if "-MF" in arguments:
            arguments[arguments.index("-MF") + 1] = f"{out}.d"
        return [*arguments, "-w"]

    def _link_of(self, test):
        name = test.lstrip("/").replace(":", "/")
        return next((pair for pair in self._link.items() if pair[0].endswith(name)), (None, []))

    def _object(self, path):
        arguments = self._compile.get(path, ["-o", None])  # compiled for none of the tests
        return arguments[arguments.index("-o") + 1]

    def check(self, targets):
        """That each test has something of its source; `targets`: source -> tests."""
        wrong = [f"{test} does not link {path}" for path, tests in targets.items() for test in tests
                 if self._object(path) not in self._link_of(test)[1]]
        if wrong:
            raise WrongTargets("; ".join(wrong))

    def link(self, test, path, with_object, out):
        """The test with another object in the place of that of `path`."""
        original, arguments = self._link_of(test)
        replaced = [str(with_object) if argument == self._object(path) else argument for argument in arguments]
        replaced[replaced.index("-o") + 1] = str(out)
        return [argument.replace("$ORIGIN", str(self.root / pathlib.Path(original).parent)) for argument in replaced]


class Runner:
    """Compiles mutants and runs tests with them."""

    def __init__(self, commands, options, scratch):
        self.commands = commands
        self.prefix = shlex.split(options.prefix)
        self.timeout = options.timeout
        self.scratch = pathlib.Path(scratch)

    def execute(self, command, timeout=None, **more):
        """The exit code; None when it takes too long."""
        with subprocess.Popen([*self.prefix, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, start_new_session=True, **more) as process:
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def must(self, command):
        subprocess.run([*self.prefix, *command], cwd=self.commands.root, check=True, stdin=subprocess.DEVNULL)

    def outcome(self, path, changed, tests):
        """(outcome, the test that has killed it)."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            folder = pathlib.Path(folder)
            mutant, compiled, program = folder / "mutant.cc", folder / "mutant.o", folder / "test"
            mutant.write_text(changed, encoding="utf-8")
            if self.execute(self.commands.compile(path, mutant, compiled), cwd=self.commands.root) != 0:
                return NOT_COMPILED, ""
            environment = {**os.environ, "TEST_TMPDIR": str(folder), "GTEST_FAIL_FAST": "1"}
            for test in tests:
                self.must(self.commands.link(test, path, compiled, program))
                if self.execute([str(program)], self.timeout, cwd=folder, env=environment) != 0:
                    return KILLED, test
        return SURVIVED, ""


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


def run_mutants(todo, options, targets, scratch):
    """Yields results as they come."""
    paths = sorted({mutant.path for mutant in todo})
    tests = sorted({test for path in paths for test in targets[path]})
    commands = Commands(options.bazel.split(), paths, tests)
    commands.check({path: targets[path] for path in paths})
    runner = Runner(commands, options, scratch)
    deadline = time.monotonic() + 60 * options.budget
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    for path, source in sources.items():
        outcome = runner.outcome(path, source, targets[path])
        if outcome != (SURVIVED, ""):
            raise RuntimeError(f"{path} without any change: {' '.join(outcome)}")

    def result(mutant):
        if time.monotonic() >= deadline:
            return None
        begin = time.monotonic()
        source = sources[mutant.path]
        outcome, killer = runner.outcome(mutant.path, mutant.apply(source), targets[mutant.path])
        return {"key": mutant.key, "path": mutant.path, "line": mutant.line, "what": mutant.what, "outcome": outcome,
                "killer": killer, "seconds": round(time.monotonic() - begin), "diff": diff(source, mutant)}

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(result, mutant) for mutant in todo]):
            if future.result() is not None:
                yield future.result()


def main(arguments):
    options = parse_arguments(arguments)
    with open(options.targets, encoding="utf-8") as file:
        targets = json.load(file)
    unknown = [path for path in options.files if path not in targets]
    if unknown:
        print(f"{options.targets} names no tests for {', '.join(unknown)}", file=sys.stderr)
        return 2
    chosen = []
    for path in options.files or targets:
        source = (ROOT / path).read_text(encoding="utf-8")
        chosen += choose(mutants.mutants(path, source), options.count, options.seed)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.key} {mutant.path}:{mutant.line}: {mutant.what}")
        return 0
    known, equivalents = read_results(options.results), read_equivalents(HERE / "equivalent.txt")
    todo = [mutant for mutant in chosen if mutant.key not in known or
            (options.retry and known[mutant.key]["outcome"] == SURVIVED and mutant.key not in equivalents)]
    if todo:
        with tempfile.TemporaryDirectory(prefix="mutation.") as scratch:
            for number, result in enumerate(run_mutants(todo, options, targets, scratch), 1):
                known[result["key"]] = result
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
                print(f"[{number}/{len(todo)}] {result['path']}:{result['line']}: {result['what']}: "
                      f"{result['outcome']} {result['killer']} ({result['seconds']} s)", file=sys.stderr, flush=True)
    results = [known[mutant.key] for mutant in chosen if mutant.key in known]
    if len(results) < len(chosen):
        print(f"out of time, {len(chosen) - len(results)} mutants are left", file=sys.stderr)
    return 1 if report(results, equivalents, sys.stdout) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except WrongTargets as error:
        print(error, file=sys.stderr)
        sys.exit(2)
