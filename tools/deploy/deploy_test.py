#!/usr/bin/env python3
"""Deploys a program that uses LibTorch and runs the copy of a copy with an empty environment."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import deploy  # noqa: E402

PROGRAM = "base/torch_status_test"  # among this test's runfiles


def run(program):
    return subprocess.run([program], env={}, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, check=False)


class DeployTest(unittest.TestCase):

    def setUp(self):
        self.root = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        self.folder = os.path.join(self.root, "deployed")

    def tearDown(self):
        shutil.rmtree(self.root)

    def test_a_moved_copy_runs_by_itself(self):
        program = deploy.deploy(PROGRAM, self.folder)
        self.assertEqual(os.path.dirname(program), self.folder)
        elsewhere = os.path.join(self.root, "elsewhere")
        os.rename(self.folder, elsewhere)
        copy = os.path.join(elsewhere, os.path.basename(PROGRAM))
        result = run(copy)
        self.assertEqual(result.returncode, 0, result.stdout)
        found = deploy.libraries(copy)
        self.assertEqual(found["libtorch_cpu.so"], os.path.join(elsewhere, "lib", "libtorch_cpu.so"))
        self.assertNotIn("libc.so.6", os.listdir(os.path.join(elsewhere, "lib")))
        # Nothing but the folder makes it run.
        os.remove(os.path.join(elsewhere, "lib", "libc10.so"))
        self.assertNotEqual(run(copy).returncode, 0)
        with self.assertRaisesRegex(deploy.Failure, "libc10.so was not found"):
            deploy.check(copy, elsewhere)

    def test_the_program_that_was_built_stays_as_it_is(self):
        before = pathlib.Path(PROGRAM).read_bytes()
        deploy.deploy(PROGRAM, self.folder)
        self.assertEqual(pathlib.Path(PROGRAM).read_bytes(), before)

    def test_a_folder_in_use_is_refused(self):
        os.makedirs(self.folder)
        pathlib.Path(self.folder, "mine").write_text("text")
        with self.assertRaisesRegex(deploy.Failure, "not empty"):
            deploy.deploy(PROGRAM, self.folder)

    def test_what_is_no_program_is_refused(self):
        script = pathlib.Path(self.root, "script")
        script.write_text("#!/bin/sh\n")
        with self.assertRaises(deploy.Failure):
            deploy.deploy(str(script), self.folder)
        with self.assertRaisesRegex(deploy.Failure, "64 bits"):
            deploy.run_path_places(script.read_bytes())


if __name__ == "__main__":
    unittest.main()
