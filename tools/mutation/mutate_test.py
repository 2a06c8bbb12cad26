#!/usr/bin/env python3
"""Tests mutants.py and mutate.py, with scripts in the place of Bazel, compiler and linker."""

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


class FakeCommands:
    """Sources compile if they have "int" in them; a test passes if what its name says is in the source."""

    def __init__(self, root):
        self.root = root

    def compile(self, path, source, out):
        return ["sh", "-c", 'grep -q int "$0" && cp "$0" "$1"', str(source), str(out)]

    def link(self, test, path, with_object, out):
        program = "tail -f /dev/null" if test == "Hang" else f"grep -q '{test}' '{with_object}'"
        return ["sh", "-c", f'echo "{program}" | cat - > "$0"; chmod +x "$0"; sed -i 1i#!/bin/sh "$0"', str(out)]


class RunTest(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")))
        self.commands = FakeCommands(self.folder)
        self.runner = mutate.Runner(self.commands, mutate.parse_arguments(["--timeout", "30"]), self.folder)

    def outcome(self, changed, tests=("Reset", "Note")):
        return self.runner.outcome("a.cc", changed, tests)

    def test_outcomes(self):
        self.assertEqual(self.outcome(SOURCE.replace("Note(a)", "")), (mutate.KILLED, "Note"))
        self.assertEqual(self.outcome(SOURCE.replace("Log", "")), (mutate.SURVIVED, ""))
        self.assertEqual(self.outcome(SOURCE[:SOURCE.index("namespace")]), (mutate.NOT_COMPILED, ""))

    def test_a_test_that_hangs_has_failed(self):
        self.runner.timeout = 0.1
        self.assertEqual(self.outcome(SOURCE, ["Hang"]), (mutate.KILLED, "Hang"))

    def test_nothing_is_left(self):
        self.outcome(SOURCE)
        self.assertEqual(list(self.folder.iterdir()), [])


class CommandsTest(unittest.TestCase):

    def setUp(self):
        folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")))
        compiles = ["gcc", "-MD", "-MF", "out/d/a.d", "-Werror", "-c", "d/a.cc", "-o", "out/d/a.o"]
        links = ["gcc", "-o", "out/d/a_test", "-Wl,-rpath,$ORIGIN/../lib", "out/d/a_test.o", "out/d/a.o", "@out/params"]
        stripped = ["strip", "-o", "out/d/a_test.stripped", "out/d/a_test"]
        actions = [{"mnemonic": "CppCompile", "arguments": compiles}, {"mnemonic": "CppLink", "arguments": links},
                   {"mnemonic": "CppLink", "arguments": stripped}, {"mnemonic": "CppLink"}]
        (folder / "actions").write_text(json.dumps({"actions": actions}), encoding="utf-8")
        bazel = folder / "bazel"
        bazel.write_text(f'#!/bin/sh\ncase $1 in aquery) cat {folder}/actions ;; info) echo /base/of ;; esac\n',
                         encoding="utf-8")
        bazel.chmod(0o755)
        self.commands = mutate.Commands([str(bazel)], ["d/a.cc"], ["//d:a_test"])

    def test_compiles_another_source_by_the_same_command(self):
        self.assertEqual(self.commands.compile("d/a.cc", "/s/m.cc", "/s/m.o"),
                         ["gcc", "-MD", "-MF", "/s/m.o.d", "-Werror", "-c", "/s/m.cc", "-o", "/s/m.o", "-w"])

    def test_links_with_another_object(self):
        self.assertEqual(self.commands.link("//d:a_test", "d/a.cc", "/s/m.o", "/s/test"),
                         ["gcc", "-o", "/s/test", "-Wl,-rpath,/base/of/out/d/../lib", "out/d/a_test.o", "/s/m.o"])

    def test_a_test_without_the_source_is_an_error(self):
        self.commands.check({"d/a.cc": ["//d:a_test"]})
        self.commands._compile["d/b.cc"] = ["gcc", "-c", "d/b.cc", "-o", "out/d/b.o"]  # pylint: disable=protected-access
        with self.assertRaisesRegex(mutate.WrongTargets, "^//d:a_test does not link d/b.cc; //d:a_test does not link d/c.cc$"):
            self.commands.check({path: ["//d:a_test"] for path in ("d/a.cc", "d/b.cc", "d/c.cc")})


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
