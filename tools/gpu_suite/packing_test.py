#!/usr/bin/env python3
"""Tests of what goes into the folder, with a program of the system for a program."""
import json
import os
import pathlib
import sys
import tempfile
import unittest

import packing

LISTING = """\
cc_binary rule //benchmarks:device_ops_benchmark
cc_binary rule //benchmarks:gpu_train_step
cc_test rule //comm:nccl_communicator_test
cc_test rule //third_party/cuda:smoke_test
cc_library rule //comm:nccl
"""
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

    def test_tests_and_what_tells_most_come_first(self):
        self.assertEqual([(label, entry["kind"], entry["takes_device"], entry["flags"])
                          for label, entry in packing.programs_of(LISTING).items()],
                         [("//third_party/cuda:smoke_test", "test", False, []),
                          ("//comm:nccl_communicator_test", "test", False, []),
                          ("//benchmarks:gpu_train_step", "benchmark", True, []),
                          ("//benchmarks:device_ops_benchmark", "benchmark", False, ["--benchmark_filter=^cuda/"])])

    def test_libraries_that_the_other_machine_may_lack(self):
        self.assertEqual(packing.foreign_libraries(NEEDED), [])
        self.assertEqual(packing.foreign_libraries(NEEDED.replace("libnccl.so.2", "liburing.so.2")), ["liburing.so.2"])

    def test_the_folder_has_all_that_a_run_needs_and_no_library(self):
        programs = packing.programs_of("cc_test rule //a/b:c_test")
        system = pathlib.Path("/bin/true").resolve()
        size = packing.fill(self.out, programs, {"//a/b:c_test": system}, "abc", "--config=cuda")
        self.assertEqual(sorted(str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file()),
                         ["bin/a.b.c_test", "driver.py", "libtorch.py", "manifest.json", "peer_gpt.py", "report.py", "run"])
        self.assertTrue(os.access(self.out / "run", os.X_OK))
        self.assertTrue(os.access(self.out / "bin" / "a.b.c_test", os.X_OK))
        self.assertGreater(size, 0)
        manifest = json.loads((self.out / "manifest.json").read_text())
        self.assertEqual((manifest["sources"], manifest["programs"][0]["name"]), ("abc", "a/b:c_test"))
        self.assertIn("usage: ", packing.output_of([sys.executable, str(self.out / "run"), "--help"]))

    def test_a_folder_that_is_too_large_is_refused(self):
        self.addCleanup(setattr, packing, "LIMIT_BYTES", packing.LIMIT_BYTES)
        packing.LIMIT_BYTES = 10
        with self.assertRaisesRegex(packing.PackError, "leave programs out"):
            packing.fill(self.out, {}, {}, "abc", "")

    def test_a_command_that_fails_is_named(self):
        with self.assertRaisesRegex(packing.PackError, "'/bin/false' failed"):
            packing.output_of(["/bin/false"])


if __name__ == "__main__":
    unittest.main()
