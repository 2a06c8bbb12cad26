#!/usr/bin/env python3
"""Tests of the limit on memory, on programs."""
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import unittest

import train_within_memory as within

MIB = 1 << 20
# In place of the program: takes so many MiB where the model is not tiny, in a child where there are two ranks, says
# so, and ends as it is told.
PROGRAM = f"""#!{sys.executable}
import os, signal, sys
flags = dict(flag.lstrip("-").split("=", 1) for flag in sys.argv[1:])  # the last one counts
mib = 0 if flags.get("layers") == "1" else int(flags.get("mib", 0))
memory = bytearray(mib << 20)
memory[::4096] = b"x" * len(memory[::4096])
if flags.get("ranks") == "2" and mib:
    if os.fork() == 0:
        os.setsid()
        print(os.getpid(), flush=True)
        signal.pause()
    del memory
    signal.pause()
if flags.get("wait") and mib:
    signal.pause()
sys.exit(int(flags.get("exit", 0)))
"""


def state_of(pid):
    """The letter of /proc; None where the process is gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


class BytesTest(unittest.TestCase):
    def test_with_a_unit_or_without(self):
        for text, count in [("0", 0), ("17", 17), ("3KiB", 3072), ("8GiB", 8 << 30), ("512MiB", 512 * MIB)]:
            self.assertEqual(within.parse_bytes(text), count)

    def test_all_else_is_refused(self):
        for text in ["", "MiB", "-1", "8GB", "1.5GiB", "\N{SUPERSCRIPT TWO}"]:
            with self.assertRaisesRegex(within.argparse.ArgumentTypeError, "such as 8GiB"):
                within.parse_bytes(text)


class RunTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.program = self.folder / "program"
        self.program.write_text(PROGRAM)
        self.program.chmod(0o755)

    def run_within(self, limit, *flags):
        with open(self.folder / "out", "wb") as out:
            return within.run_within([str(self.program), *flags], limit, stdout=out)

    def test_ends_well_within_its_limit(self):
        outcome = self.run_within(500 * MIB)
        self.assertTrue(outcome.ended_well())
        self.assertEqual(outcome.exit_code, 0)
        self.assertIn("the run ended well", outcome.describe(500 * MIB))

    def test_is_killed_above_it(self):
        outcome = self.run_within(60 * MIB, "--mib=100", "--wait=1")
        self.assertTrue(outcome.exceeded)
        self.assertFalse(outcome.ended_well())
        self.assertGreater(outcome.peak, 60 * MIB)
        self.assertRegex(outcome.describe(60 * MIB), "of 60.0 MiB allowed; TOO MUCH")

    def test_pages_of_all_its_processes_count_once_and_all_are_killed(self):
        # Parent and child share 100 MiB until the parent drops them.
        outcome = self.run_within(60 * MIB, "--mib=100", "--ranks=2")
        self.assertTrue(outcome.exceeded)
        self.assertLess(outcome.peak, 180 * MIB)
        child = (self.folder / "out").read_text()
        if child:  # where it came so far
            self.assertIn(state_of(int(child)), (None, "Z"))

    def test_may_fail_by_itself(self):
        outcome = self.run_within(500 * MIB, "--exit=3")
        self.assertFalse(outcome.exceeded)
        self.assertFalse(outcome.ended_well())
        self.assertIn("FAILED by itself with exit code 3", outcome.describe(None))

    def main(self, *arguments):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = within.main([f"--train={self.program}", *arguments])
        return code, output.getvalue()

    def test_the_script_says_how_and_what(self):
        report = self.folder / "report.json"
        code, output = self.main("--limit=500MiB", f"--report={report}", "--", "--ranks=1")
        self.assertEqual(code, 0)
        self.assertIn("limit 500.0 MiB", output)
        self.assertIn("the run ended well", output)
        report = json.loads(report.read_text())
        self.assertEqual((report["limit"], report["baseline"], report["ended_well"]), (500 * MIB, 0, True))

    def test_the_limit_may_be_over_what_a_tiny_model_takes(self):
        report = self.folder / "report.json"
        arguments = ["--over-baseline", f"--report={report}", "--", "--mib=100"]
        code, output = self.main("--limit=200MiB", *arguments)
        self.assertEqual(code, 0, output)
        self.assertIn("baseline: peak", output)
        numbers = json.loads(report.read_text())
        self.assertGreater(numbers["baseline"], 0)
        self.assertEqual(numbers["limit"], numbers["baseline"] + 200 * MIB)
        code, output = self.main("--limit=50MiB", *arguments, "--wait=1")
        self.assertEqual(code, 1)
        self.assertIn("TOO MUCH", output)
        self.assertTrue(json.loads(report.read_text())["exceeded"])

    def test_what_cannot_be_started_is_named(self):
        for arguments, why in [([f"--train={self.folder}/none"], "no program .*none: build //testing/gpt:train"),
                               (["--over-baseline", "--", "--exit=1"], "1")]:
            with self.assertRaisesRegex(SystemExit, why):
                self.main("--limit=1GiB", *arguments)


if __name__ == "__main__":
    unittest.main()
