"""Tests of the check of docs/parity.md on small trees."""

import importlib.machinery
import importlib.util
import os
import pathlib
import tempfile
import unittest

_PATH = os.path.join(os.path.dirname(os.path.realpath(__file__)), "parity")
_LOADER = importlib.machinery.SourceFileLoader("parity", _PATH)
parity = importlib.util.module_from_spec(importlib.util.spec_from_loader("parity", _LOADER))
_LOADER.exec_module(parity)

TESTS = """
TEST(FreezingTest, Works) {}
TEST_P(WorldTest,
       IsLong) {}
TEST_F(WorldTest, IsShort) {}
"""


def findings(document):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path, text in {"docs/parity.md": document, "fsdp/a_test.cc": TESTS}.items():
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        return parity.Checker(root).run()


class ParityTest(unittest.TestCase):

    def test_names_that_are_there(self):
        self.assertEqual(findings("| 1 | `fsdp/a_test.cc: FreezingTest.Works`, `WorldTest.IsLong`, `.IsShort`, `.*` |"), [])

    def test_names_that_are_not(self):
        self.assertEqual(findings("`fsdp/a_test.cc: FreezingTest.Fails`, `WorldTest.Works`, `Other.*`\n"), [
            "docs/parity.md:1: fsdp/a_test.cc has no test FreezingTest.Fails",
            "docs/parity.md:1: fsdp/a_test.cc has no test WorldTest.Works",
            "docs/parity.md:1: fsdp/a_test.cc has no test Other.*",
        ])
        self.assertEqual(findings("\n`fsdp/b_test.cc: A.B`"), ["docs/parity.md:2: there is no fsdp/b_test.cc"])

    def test_code_is_no_name(self):
        self.assertEqual(findings("`model.Parameters`, `Options::unit.strategy`, `zero_grad()`"), [])

    def test_numbers_without_a_row(self):
        table = "## Traps (1-7)\n| | |\n|---|---|\n| 1 | a |\n| 3-4, 6 | b |\n"
        self.assertEqual(findings(table + "\n## Rest\n| 2 | |\n"), ["docs/parity.md: Traps (1-7): no row for 2, 5, 7"])
        self.assertEqual(findings(table + "| 2, 5, 7 | |\n"), [])


if __name__ == "__main__":
    unittest.main()
