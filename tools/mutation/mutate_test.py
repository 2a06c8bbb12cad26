#!/usr/bin/env python3
"""Tests mutants.py and mutate.py, with a script in Bazel's place."""

import io
import json
import os
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import mutants  # pylint: disable=wrong-import-position
import mutate  # pylint: disable=wrong-import-position

SOURCE = '''#include "a && b.h"

namespace n {

// if (a && b) is only said here.
int Least(int a, int b) {
  if (a < b || a == 0) {
    return a;
  }
  Log("a < b", true);
  Note(a);
  return b - 1;
}

void Reset() {
  const int zero = 0;
  value = zero;
}

}  // namespace n
'''


def changes(source=SOURCE):
    """what -> the sources it leads to."""
    found = {}
    for mutant in mutants.mutants("a.cc", source):
        found.setdefault(mutant.what, []).append(mutant.apply(source))
    return found


class MutantsTest(unittest.TestCase):

    def test_conditions(self):
        found = changes()
        self.assertIn("if (!(a < b || a == 0)) {", found["negate the condition"][0])
        self.assertIn("if (a < b && a == 0) {", found["|| becomes &&"][0])
        self.assertIn("if (a <= b || a == 0) {", found["< becomes <="][0])
        self.assertIn("if (a < b || a != 0) {", found["== becomes !="][0])

    def test_comments_strings_and_includes_stay(self):
        found = changes()
        self.assertNotIn("&& becomes ||", found)
        for what in ("negate the condition", "|| becomes &&", "< becomes <="):
            self.assertEqual(len(found[what]), 1, what)

    def test_statements(self):
        found = changes()
        self.assertEqual(len(found["drop the statement"]), 3)  # two calls and an assignment
        self.assertIn("  Note(a);\n  Log(\"a < b\", true);\n", found["swap two statements"][0])
        self.assertEqual(len(found["swap two statements"]), 1)  # no use before its declaration
        self.assertIn("void Reset() {\n  return;\n", found["return early"][0])
        self.assertEqual(len(found["return early"]), 1)  # Least() returns a value
        self.assertIn("return b;", found["- 1 becomes nothing"][0])

    def test_a_statement_of_several_lines_goes_as_a_whole(self):
        source = "\nnamespace n {\nvoid F() {\n  Call(a,\n       b);\n  Other();\n}\n}\n"
        self.assertIn("void F() {\n  ;\n  Other();\n", changes(source)["drop the statement"][0])

    def test_keys_tell_mutants_apart_and_do_not_depend_on_lines(self):
        twice = SOURCE.replace("  Note(a);\n", "  Note(a);\n  if (x) return 1;\n  Note(a);\n")
        keys = [mutant.key for mutant in mutants.mutants("a.cc", twice)]
        self.assertEqual(len(keys), len(set(keys)))
        moved = SOURCE.replace("namespace n {\n", "namespace n {\n\n\n", 1)
        self.assertEqual([mutant.key for mutant in mutants.mutants("a.cc", SOURCE)],
                         [mutant.key for mutant in mutants.mutants("a.cc", moved)])


class ChooseTest(unittest.TestCase):

    def test_is_the_same_every_time_and_grows(self):
        found = mutants.mutants("a.cc", SOURCE)
        few, more = mutate.choose(found, 4, seed=3), mutate.choose(found, 7, seed=3)
        self.assertEqual(few, mutate.choose(found, 4, seed=3))
        self.assertEqual(len(few), 4)
        self.assertLess(set(few), set(more))
        self.assertEqual(len({mutant.what for mutant in few}), 4)
        self.assertCountEqual(mutate.choose(found, 1000, seed=3), found)


class RunTest(unittest.TestCase):
    """The script fails the test when a source has lost what its name asks for, and the build without "int"."""

    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")))
        (self.root / "a.cc").write_text(SOURCE, encoding="utf-8")
        bazel = self.root / "bazel"
        bazel.write_text('#!/bin/sh\nfor test; do :; done\ngrep -q int a.cc || exit 1\n'
                         'grep -q "$test" a.cc || exit 3\n', encoding="utf-8")
        bazel.chmod(0o755)
        options = mutate.parse_arguments(["--worktree", str(self.root), "--bazel", str(bazel)])
        self.runner = mutate.Runner(options)

    def mutant(self, old, new):
        begin = SOURCE.index(old)
        return mutants.Mutant("a.cc", begin, begin + len(old), new, "", 1, old)

    def test_outcomes(self):
        tests = ["Reset", "Note"]
        self.assertEqual(self.runner.run(self.mutant("Note(a)", ""), tests), (mutate.KILLED, "Note"))
        self.assertEqual(self.runner.run(self.mutant("Log", ""), tests), (mutate.SURVIVED, ""))
        self.assertEqual(self.runner.run(self.mutant(SOURCE, ""), tests), (mutate.NOT_COMPILED, ""))
        self.assertEqual(self.runner.read("a.cc"), SOURCE)

    def test_what_is_neither_stops_the_run_and_leaves_the_source(self):
        (self.root / "bazel").write_text("#!/bin/sh\nexit 37\n", encoding="utf-8")
        with self.assertRaisesRegex(RuntimeError, "ended with 37"):
            self.runner.run(self.mutant("Log", ""), ["Reset"])
        self.assertEqual(self.runner.read("a.cc"), SOURCE)


class ReportTest(unittest.TestCase):

    def result(self, key, outcome):
        return {"key": key, "path": "a.cc", "what": "w", "outcome": outcome, "diff": f"diff of {key}\n"}

    def test_counts_and_shows_what_nobody_explains(self):
        out = io.StringIO()
        results = [self.result("k1", mutate.KILLED), self.result("k2", mutate.KILLED),
                   self.result("k3", mutate.SURVIVED), self.result("k4", mutate.SURVIVED),
                   self.result("k5", mutate.NOT_COMPILED)]
        self.assertEqual(mutate.report(results, {"k4": "because"}, out), 1)
        self.assertIn("a.cc: 2 of 3 killed (66.7 %), 1 more are equivalent, 1 did not compile", out.getvalue())
        self.assertIn("diff of k3", out.getvalue())
        self.assertNotIn("diff of k4", out.getvalue())

    def test_results_and_explanations_are_read_back(self):
        folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")))
        self.assertEqual(mutate.read_results(folder / "none"), {})
        (folder / "results").write_text(json.dumps(self.result("k1", mutate.KILLED)) + "\n", encoding="utf-8")
        self.assertEqual(mutate.read_results(folder / "results")["k1"]["outcome"], mutate.KILLED)
        (folder / "why").write_text("# comment\n\nk4 the same value\n", encoding="utf-8")
        self.assertEqual(mutate.read_equivalents(folder / "why"), {"k4": "the same value"})


if __name__ == "__main__":
    unittest.main()
