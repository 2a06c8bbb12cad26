#!/usr/bin/env python3
"""Tests of a whole dry run: what a run does where a GPU is, with the benchmarks on the fake device.

usage: dry_run_test.py GPU_BENCHMARKS_DRY DEVICE_OPS_BENCHMARK A_TEST

A test of the CPU stands in for those that need a GPU, and a program that only reads its flags for PyTorch, unless
PEERS_PYTHON is a Python that has torch.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import packing
import plan
import report
import targets

LABELS = {plan.BENCHMARKS: "cc_binary", plan.DEVICE_OPS: "cc_binary", plan.OPERATORS_TEST: "cc_test",
          "//third_party/cuda:smoke_test": "cc_test", "//fsdp/tests/device:cuda_training_test": "cc_test",
          "//comm/nccl:nccl_communicator_test": "cc_test"}
# What nobody measures here: memory of the device, which the fake one does not count, and its kernels.
NOT_HERE = {"peak_MB", "reserved_of_plan", "bytes_per_second"}
PEER = """#!{python}
import json, pathlib, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
import peer_flags
args = peer_flags.parse(sys.argv[2:], "")
assert args.device == "cpu" and args.layers == 2, args
print(json.dumps(dict(impl=args.impl, step_ms=2.5, host_ms=1.5, tok_s=1000.5, peak_device_mb=10)))
"""
binaries = {}


def folders_of_libraries(programs):
    """Where the loader finds, of programs where Bazel has put them, what the system does not have."""
    said = subprocess.run(["ldd", *programs], stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted({str(pathlib.Path(path).parent) for path in re.findall(r"=> (/\S+)", said)
                   if not path.startswith(("/lib", "/usr/lib"))})


class DryRunTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        folder = pathlib.Path(cls.scratch.name)
        cls.packed, cls.out = folder / "packed", folder / "out"
        packing.fill(cls.packed, binaries, plan.programs(LABELS), "abc", "a dry run")
        for path in (cls.packed / "bin").iterdir():
            path.chmod(0o600)  # as some ways to carry a folder leave it
        peer = folder / "python"
        peer.write_text(PEER.format(python=sys.executable))
        peer.chmod(0o755)
        cls.python = os.environ.get("PEERS_PYTHON") or str(peer)
        libraries = folders_of_libraries(sorted(set(binaries.values())))
        cls.environment = {**os.environ, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": ":".join(
            libraries + list(filter(None, [os.environ.get("LD_LIBRARY_PATH")])))}
        # What has begun within half a second, and the rest.
        cls.first = cls.run_suite("--budget=10.5")
        cls.results_of_first = cls.results()
        cls.second = cls.run_suite()

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    @classmethod
    def run_suite(cls, *flags):
        return subprocess.run([sys.executable, str(cls.packed / "run"), "--dry-run", f"--python={cls.python}",
                               f"--out={cls.out}", *flags], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, env=cls.environment, check=False)

    @classmethod
    def results(cls):
        return json.loads((cls.out / "results.json").read_text())

    def test_a_run_within_a_budget_ends_with_a_report_and_the_next_goes_on(self):
        self.assertEqual(self.first.returncode, 1, self.first.stdout)
        self.assertIn("the budget is spent", self.first.stdout)
        before = [entry for entry in self.results_of_first["programs"] if entry["outcome"] != report.CUT_OFF]
        self.assertLess(len(before), len(plan.programs(LABELS)))
        # Those are not run again: their times stand.
        self.assertEqual(self.results()["programs"][:len(before)], before)
        self.assertEqual(self.second.returncode, 0, self.second.stdout)

    def test_all_that_is_planned_passes_in_order(self):
        self.assertEqual([(entry["name"], entry["outcome"]) for entry in self.results()["programs"]],
                         [(entry["name"], report.SKIPPED if entry["kind"] == "sanitizer" else report.PASSED)
                          for entry in plan.programs(LABELS)], self.second.stdout)

    def test_every_target_has_its_figure(self):
        for target, value, _ in targets.check(self.results()):
            if NOT_HERE.isdisjoint({target.figure[1], *(target.over or ())}):
                self.assertIsNotNone(value, target)
                self.assertGreater(abs(value), 0, target)

    def test_kernels_of_targets_are_measured_where_there_is_a_gpu(self):
        listed = subprocess.run([binaries[plan.file_of(plan.DEVICE_OPS)], "--benchmark_list_tests"],
                                stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        wanted = {where[0] for target in targets.TARGETS for where in (target.figure, target.over)
                  if where and where[1] == "bytes_per_second"}
        self.assertGreater(len(wanted), 2)
        for case in wanted:
            self.assertIn(case.replace("cuda/", "cpu/") + "/real_time", listed)

    def test_everybody_is_compared(self):
        compared = targets.compare(self.results())
        self.assertEqual([title for title, _ in compared], [title for title, _ in targets.COMPARISONS])
        for title, rows in compared:
            for name, milliseconds, _, _, over_ours in rows:
                self.assertGreater(milliseconds, 0, f"{title}: {name}")
                self.assertGreater(over_ours, 0, f"{title}: {name}")

    def test_the_report_is_for_people(self):
        text = (self.out / "report.md").read_text()
        for part in ("none, a dry run: figures mean nothing", f"{len(plan.programs(LABELS))} programs ran, 0 of them failed.",
                     "## Targets", "## Beside PyTorch", "## Tests", "## All figures"):
            self.assertIn(part, text)
        for part in ("## What failed", "Not run"):
            self.assertNotIn(part, text)

    def test_without_the_flag_it_says_that_there_is_no_gpu(self):
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("there is one")
        done = subprocess.run([sys.executable, str(self.packed / "run"), f"--out={self.out}.none"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("there is no GPU", done.stdout)


if __name__ == "__main__":
    dry, device_ops, test = map(os.path.abspath, sys.argv[1:4])
    binaries.update({plan.file_of(label): test if kind == "cc_test" else dry for label, kind in LABELS.items()})
    binaries[plan.file_of(plan.DEVICE_OPS)] = device_ops
    unittest.main(argv=sys.argv[:1])
