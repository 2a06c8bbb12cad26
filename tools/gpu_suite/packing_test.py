#!/usr/bin/env python3
"""Tests of what goes into the folder, with a program of the system for a program."""
import json
import os
import pathlib
import sys
import tempfile
import unittest

import packing
import plan

NEEDED = """\
 0x0000000000000001 (NEEDED)             Shared library: [libtorch_cuda.so]
 0x0000000000000001 (NEEDED)             Shared library: [libnccl.so.2]
 0x0000000000000001 (NEEDED)             Shared library: [libstdc++.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [ld-linux-x86-64.so.2]
 0x000000000000001d (RUNPATH)            Library runpath: [$ORIGIN/x]
"""


class PackingTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.out = pathlib.Path(scratch.name, "out")

    def test_libraries_that_the_other_machine_may_lack(self):
        self.assertEqual(packing.foreign_libraries(NEEDED), [])
        self.assertEqual(packing.foreign_libraries(NEEDED.replace("libnccl.so.2", "liburing.so.2")), ["liburing.so.2"])

    def test_the_folder_has_all_that_a_run_needs_and_no_library(self):
        programs = plan.programs({"//a/b:c_test": "cc_test"})
        system = pathlib.Path("/bin/true").resolve()
        size = packing.fill(self.out, {"a.b.c_test": system}, programs, "abc", "--config=cuda")
        self.assertEqual(sorted(str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file()),
                         sorted(["bin/a.b.c_test", "manifest.json", "run", *packing.SCRIPTS, *packing.PEER_SCRIPTS]))
        self.assertTrue(os.access(self.out / "run", os.X_OK))
        self.assertTrue(os.access(self.out / "bin" / "a.b.c_test", os.X_OK))
        self.assertGreater(size, 0)
        manifest = json.loads((self.out / "manifest.json").read_text())
        self.assertEqual((manifest["sources"], manifest["programs"]), ("abc", programs))
        # It imports all that it needs from there.
        self.assertIn("usage: ", packing.output_of([sys.executable, "-I", str(self.out / "run"), "--help"]))

    def test_a_folder_that_is_too_large_is_refused_and_what_is_large_named(self):
        self.addCleanup(setattr, packing, "LIMIT_BYTES", packing.LIMIT_BYTES)
        packing.LIMIT_BYTES = 10
        with self.assertRaisesRegex(packing.PackError, r"the largest: bin/large 0\.\d.*--archs"):
            packing.fill(self.out, {"large": pathlib.Path("/bin/true").resolve()}, [], "abc", "")

    def test_the_folder_fits_through_what_machines_are_reached_by(self):
        self.assertEqual(packing.LIMIT_BYTES, 40 * 2**20)

    def test_a_command_that_fails_is_named(self):
        with self.assertRaisesRegex(packing.PackError, "'/bin/false' failed"):
            packing.output_of(["/bin/false"])


if __name__ == "__main__":
    unittest.main()
