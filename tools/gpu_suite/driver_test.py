#!/usr/bin/env python3
"""Tests of the search for a GPU, with small libraries for a driver."""
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import driver

SOURCE = """
int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}
int cuInit(unsigned flags) {{ return {init}; }}
int cuDeviceGetCount(int* count) {{ *count = {count}; return 0; }}
"""


class DriverTest(unittest.TestCase):

    def why(self, version=13000, init=0, count=1):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        library = pathlib.Path(scratch.name, "libcuda.so.1")
        compiler = shutil.which("cc") or shutil.which("gcc")
        subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], check=True,
                       input=SOURCE.format(version=version, init=init, count=count), text=True)
        return driver.why_no_gpu(str(library))

    def test_a_gpu_is_seen(self):
        self.assertIsNone(self.why())
        self.assertIsNone(self.why(version=13010, count=8))

    def test_a_machine_without_driver_is_told(self):
        self.assertRegex(driver.why_no_gpu("libno-such-driver.so.1"), "there is no GPU: .* not there.*--gpus all")

    def test_an_old_driver_is_told(self):
        self.assertRegex(self.why(version=12080), "knows CUDA 12.8.*driver 580")

    def test_a_driver_without_a_gpu_is_told(self):
        self.assertRegex(self.why(init=100), "there is no GPU: .*error 100.*CUDA_VISIBLE_DEVICES")
        self.assertRegex(self.why(count=0), "there is no GPU: .*CUDA_VISIBLE_DEVICES")


if __name__ == "__main__":
    unittest.main()
