#!/usr/bin/env python3
"""Tests of the limit on memory: on recorded text, on a tree of files in place of control groups, and on programs."""
import contextlib
import errno
import io
import json
import os
import pathlib
import shutil
import sys
import tempfile
import unittest
from unittest import mock

import train_within_memory as within

MIB = 1 << 20
MOUNTS = """\
31 24 0:28 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs rw
32 31 0:29 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
41 31 0:38 {root} /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
"""
GROUPS = "4:memory:/old\n0::/user.slice/run-1.scope\n"
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


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def file(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


class BytesTest(unittest.TestCase):
    def test_with_a_unit_or_without(self):
        for text, count in [("0", 0), ("17", 17), ("3KiB", 3072), ("8GiB", 8 << 30), ("512MiB", 512 * MIB)]:
            self.assertEqual(within.parse_bytes(text), count)

    def test_all_else_is_refused(self):
        for text in ["", "MiB", "-1", "8GB", "1.5GiB", "\N{SUPERSCRIPT TWO}"]:
            with self.assertRaisesRegex(within.argparse.ArgumentTypeError, "such as 8GiB"):
                within.parse_bytes(text)


class OwnGroupTest(Folder):
    def own(self, mounts, groups=GROUPS):
        return within.ControlGroup.own_directory(self.file("mounts", mounts), self.file("groups", groups))

    def test_is_below_the_mount(self):
        self.assertEqual(self.own(MOUNTS.format(root="/")),
                         pathlib.Path("/sys/fs/cgroup/unified/user.slice/run-1.scope"))
        self.assertEqual(self.own(MOUNTS.format(root="/user.slice")),
                         pathlib.Path("/sys/fs/cgroup/unified/run-1.scope"))
        self.assertEqual(self.own(MOUNTS.format(root="/"), "0::/\n"), pathlib.Path("/sys/fs/cgroup/unified"))

    def test_may_not_be_there(self):
        for mounts, groups in [(MOUNTS.replace("cgroup2", "tmpfs"), GROUPS), (MOUNTS.format(root="/"), "4:memory:/\n")]:
            with self.assertRaisesRegex(within.Unavailable, "no cgroup v2 is mounted"):
                self.own(mounts, groups)


class ControlGroupTest(Folder):
    """Files stand for the kernel's, which takes a directory away with all that is in it."""

    def setUp(self):
        super().setUp()
        patch = mock.patch.object(within, "remove_group", lambda directory: shutil.rmtree(directory, True))
        patch.start()
        self.addCleanup(patch.stop)
        self.procs = self.file("cgroup.procs", f"{os.getpid()}\n")
        self.file("cgroup.controllers", "cpu memory\n")
        self.control = self.file("cgroup.subtree_control", "memory\n")
        self.group = self.folder / f"train_within_memory.{os.getpid()}"

    def test_has_the_limit_and_is_removed(self):
        group = within.ControlGroup(7 * MIB, self.folder)
        self.assertEqual((self.group / "memory.max").read_text(), str(7 * MIB))
        self.assertEqual((self.group / "memory.oom.group").read_text(), "1")
        group.join()
        self.assertEqual((self.group / "cgroup.procs").read_text(), "0")
        self.assertEqual(self.control.read_text(), "memory\n")
        group.close()
        self.assertFalse(self.group.exists())

    def test_tells_what_the_kernel_has_done(self):
        group = within.ControlGroup(MIB, self.folder)
        self.assertIsNone(group.peak())
        (self.group / "memory.peak").write_text("4096\n")
        self.assertEqual(group.peak(), 4096)
        for kills in (0, 2):
            (self.group / "memory.events").write_text(f"low 0\nmax 9\noom 1\noom_kill {kills}\noom_group_kill 0\n")
            self.assertEqual(group.has_killed(), kills > 0)

    def test_says_why_it_cannot_be(self):
        self.control.unlink()
        with self.assertRaisesRegex(within.Unavailable, "cgroup.subtree_control: No such file"):
            within.ControlGroup(MIB, self.folder)
        self.file("cgroup.controllers", "cpu\n")
        with self.assertRaisesRegex(within.Unavailable, "has no control of memory"):
            within.ControlGroup(MIB, self.folder)
        self.assertFalse(self.group.exists())

    def busy(self, times):
        """Writes of +memory are refused so often, as where processes are in the group."""
        write, refused = within.write_control, []

        def refuse(path, text):
            if text == "+memory" and len(refused) < times:
                refused.append(path)
                raise OSError(errno.EBUSY, "Device or resource busy", str(path))
            write(path, text)

        return mock.patch.object(within, "write_control", refuse)

    def test_this_process_makes_room_for_children_of_its_group(self):
        self.control.write_text("cpu\n")
        leaf = self.folder / f"script.{os.getpid()}"
        with self.busy(1):
            group = within.ControlGroup(MIB, self.folder)
        self.assertEqual((leaf / "cgroup.procs").read_text(), str(os.getpid()))
        self.assertEqual(self.control.read_text(), "+memory")
        group.close()
        self.assertEqual(self.control.read_text(), "-memory")
        self.assertEqual(self.procs.read_text(), "0")
        self.assertFalse(leaf.exists())

    def test_other_processes_are_left_where_they_are(self):
        self.control.write_text("cpu\n")
        self.procs.write_text(f"1\n{os.getpid()}\n")
        with self.busy(1), self.assertRaisesRegex(within.Unavailable, "has other processes in it"):
            within.ControlGroup(MIB, self.folder)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()),
                         ["cgroup.controllers", "cgroup.procs", "cgroup.subtree_control"])


class RunTest(Folder):
    def setUp(self):
        super().setUp()
        self.program = self.file("program", PROGRAM)
        self.program.chmod(0o755)

    def run_within(self, limit, *flags):
        with open(self.folder / "out", "wb") as out:
            return within.run_within([str(self.program), *flags], limit, stdout=out)

    def test_ends_well_within_its_limit(self):
        outcome = self.run_within(500 * MIB)
        self.assertTrue(outcome.ended_well())
        self.assertEqual((outcome.method, outcome.exit_code), ("pss", 0))
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
            code = within.main([f"--train={self.program}", "--method=pss", *arguments])
        return code, output.getvalue()

    def test_the_script_says_how_and_what(self):
        report = self.folder / "report.json"
        code, output = self.main("--limit=500MiB", f"--report={report}", "--", "--ranks=1")
        self.assertEqual(code, 0)
        self.assertIn("limit 500.0 MiB, kept by sampling the PSS", output)
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
