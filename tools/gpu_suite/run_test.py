#!/usr/bin/env python3
"""Tests of a whole run, with scripts for programs and empty files for LibTorch."""
import contextlib
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import driver
import execute
import libtorch
import run

PASSES = """#!/bin/sh
echo "$LD_LIBRARY_PATH" > "$SEEN"
echo '{"testsuites": [{"name": "A", "testsuite": [{"name": "B", "status": "RUN", "result": "COMPLETED"}]}]}' \\
  > "${1#--gtest_output=json:}"
"""
MEASURES = """#!/bin/sh
echo "$@" > "$SEEN"
echo '{"benchmarks": [{"name": "x/iterations:2/manual_time", "real_time": 1, "time_unit": "ms", "of_plain": 1.5}]}' \\
  > "${1#--benchmark_out=}"
"""
HANGS = "#!/bin/sh\necho begun\nsleep 600\n"
DIES = "#!/bin/sh\necho 'libcudart.so.13: cannot open' >&2\nexit 127\n"


HANGS_IN_A_CASE = "#!/bin/sh\necho '[ RUN      ] A.B'\necho begun\nsleep 600\n"
# As compute-sanitizer is called.
SANITIZES = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
program=$1; shift
echo "sanitized" >> "$SEEN.sanitizer"
exec "$program" "$@"
"""


def program(name, kind="test", limit_s=100.0, **changes):
    return {"name": name, "file": name, "kind": kind, "limit_s": limit_s, "takes_flags": False, "flags": [],
            "dry_flags": ["--dry"], **changes}


class RunTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        (self.folder / "bin").mkdir()
        self.torch = self.folder / "site" / "torch"
        (self.torch / "lib").mkdir(parents=True)
        (self.torch / "lib" / "libtorch_cuda.so").touch()
        (self.torch / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
        (self.folder / "site" / "nvidia" / "nccl" / "lib").mkdir(parents=True)
        self.seen = self.folder / "seen"
        os.environ["SEEN"] = str(self.seen)
        self.addCleanup(os.environ.pop, "SEEN")
        self.addCleanup(setattr, run, "FOLDER", run.FOLDER)
        run.FOLDER = self.folder
        self.addCleanup(setattr, driver, "why_no_gpu", driver.why_no_gpu)
        driver.why_no_gpu = lambda: None
        self.errors = io.StringIO()

    def pack(self, scripts):
        for entry, text in scripts:
            path = self.folder / "bin" / entry["file"]
            path.write_text(text)
            path.chmod(0o755)
        manifest = {"sources": "abc", "build": "--config=cuda", "programs": [entry for entry, _ in scripts]}
        (self.folder / "manifest.json").write_text(json.dumps(manifest))

    def least(self, seconds):
        self.addCleanup(setattr, run, "LEAST_S", run.LEAST_S)
        run.LEAST_S = seconds

    def run_all(self, *flags):
        with contextlib.redirect_stderr(self.errors):
            code = run.main([f"--libtorch={self.torch}", f"--out={self.folder / 'out'}", *flags])
        written = self.folder / "out" / "results.json"
        return code, json.loads(written.read_text()) if written.exists() else None

    def test_programs_see_libtorch_and_what_comes_with_it(self):
        self.pack([(program("a"), PASSES)])
        code, results = self.run_all()
        self.assertEqual(code, 0, self.errors.getvalue())
        self.assertEqual(self.seen.read_text().split(":")[:2],
                         [str(self.torch / "lib"), f"{self.folder}/site/nvidia/nccl/lib" + (
                             "" if os.environ.get("LD_LIBRARY_PATH") else "\n")])
        self.assertEqual(results["machine"]["LibTorch"], "2.11.0+cu130")
        self.assertEqual(results["programs"][0]["outcome"], "passed")
        self.assertIn("| a | passed | 1 |", (self.folder / "out" / "report.md").read_text())

    def test_benchmarks_get_flags_where_they_know_them(self):
        self.pack([(program("known", "benchmark", takes_flags=True), MEASURES)])
        code, results = self.run_all("--benchmark-flags=--turns=3 --device=cuda:1")
        self.assertEqual(code, 0, self.errors.getvalue())
        self.assertTrue(self.seen.read_text().endswith("--turns=3 --device=cuda:1\n"))
        self.assertEqual(results["programs"][0]["cases"][0]["figures"]["of_plain"], 1.5)
        self.pack([({**program("other", "benchmark"), "flags": ["--benchmark_filter=^cuda/"]}, MEASURES)])
        self.run_all("--benchmark-flags=--turns=3")
        self.assertTrue(self.seen.read_text().endswith("json --benchmark_filter=^cuda/\n"))

    def test_a_program_that_hangs_is_ended_and_the_others_run(self):
        self.pack([(program("hangs", limit_s=0.5), HANGS), (program("good"), PASSES)])
        code, results = self.run_all()
        self.assertEqual(code, 1)
        self.assertEqual([entry["outcome"] for entry in results["programs"]], ["timed out", "passed"])
        self.assertIn("begun", results["programs"][0]["output_tail"])

    def test_a_case_that_hangs_is_named(self):
        self.pack([(program("hangs", limit_s=0.5), HANGS_IN_A_CASE)])
        self.run_all()
        self.assertIn("- A.B", self.errors.getvalue())
        self.assertIn("- A.B", (self.folder / "out" / "report.md").read_text())

    def test_a_budget_is_for_all_programs_and_a_second_run_does_the_rest(self):
        self.least(0)
        self.pack([(program("good"), PASSES), (program("long"), HANGS), (program("late"), PASSES)])
        code, results = self.run_all("--budget=1.5")
        self.assertEqual(code, 1)
        self.assertEqual([entry["outcome"] for entry in results["programs"]], ["passed", "cut off"])
        self.assertIn("has 1 more to do", self.errors.getvalue())
        self.assertIn("same `--out`: long, late.", (self.folder / "out" / "report.md").read_text())

        (self.folder / "bin" / "good").write_text(DIES)  # not run again
        (self.folder / "bin" / "long").write_text(PASSES)
        code, results = self.run_all()
        self.assertEqual([(entry["name"], entry["outcome"]) for entry in results["programs"]],
                         [("good", "passed"), ("long", "passed"), ("late", "passed")])
        self.assertEqual(code, 0, self.errors.getvalue())

    def test_what_failed_is_run_again_only_if_asked_for(self):
        self.pack([(program("a"), PASSES), (program("b"), DIES)])
        self.run_all()
        (self.folder / "bin" / "b").write_text(PASSES)
        self.assertEqual(self.run_all()[0], 1)
        self.assertEqual(self.run_all("--only=^b$")[0], 0)
        self.seen.unlink()
        self.assertEqual(self.run_all()[0], 0)
        self.assertFalse(self.seen.exists())
        self.assertEqual(self.run_all("--again")[0], 0)
        self.assertTrue(self.seen.exists())

    def test_results_of_other_sources_are_forgotten(self):
        self.pack([(program("a"), PASSES)])
        self.run_all()
        manifest = json.loads((self.folder / "manifest.json").read_text())
        (self.folder / "manifest.json").write_text(json.dumps({**manifest, "sources": "def"}))
        self.seen.unlink()
        self.run_all()
        self.assertTrue(self.seen.exists())

    def test_a_run_that_is_ended_leaves_a_report_and_no_process(self):
        self.pack([(program("good"), PASSES), (program("hangs"), "#!/bin/sh\necho $$ > $SEEN\nsleep 600\n"),
                   (program("late"), PASSES)])
        shutil.copy(pathlib.Path(run.__file__), self.folder / "run")
        for name in ("driver", "execute", "libtorch", "markdown", "report", "targets"):
            shutil.copy(pathlib.Path(run.__file__).with_name(f"{name}.py"), self.folder)
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            process = subprocess.Popen([sys.executable, str(self.folder / "run"), "--dry-run", "--again",
                                        f"--out={self.folder / 'out'}"], stderr=subprocess.PIPE, text=True)
            while "[2/3]" not in process.stderr.readline():
                self.assertIsNone(process.poll())
            while not self.pid_of_hanging():
                self.assertIsNone(process.poll())
            pid = self.pid_of_hanging()
            process.send_signal(number)
            process.communicate(timeout=60)
            self.assertEqual(process.returncode, code)
            with self.assertRaises(ProcessLookupError):
                os.kill(pid, 0)
            results = json.loads((self.folder / "out" / "results.json").read_text())
            self.assertEqual([entry["outcome"] for entry in results["programs"]], ["passed", "cut off"])
            self.assertIn("same `--out`: hangs, late.", (self.folder / "out" / "report.md").read_text())
            self.seen.unlink()

    def pid_of_hanging(self):
        try:
            return int(self.seen.read_text())
        except (OSError, ValueError):
            return None

    def test_programs_that_have_lost_their_modes_run(self):
        self.pack([(program("a"), PASSES)])
        (self.folder / "bin" / "a").chmod(0o600)
        self.assertEqual(self.run_all()[0], 0, self.errors.getvalue())

    def test_a_folder_that_is_not_whole_is_refused(self):
        self.pack([(program("a"), PASSES)])
        (self.folder / "bin" / "a").unlink()
        self.assertEqual(self.run_all(), (2, None))
        self.assertIn("bin/a is not there", self.errors.getvalue())

    def test_the_sanitizer_runs_where_it_is(self):
        self.pack([(program("a"), PASSES), ({**program("a, sanitized", "sanitizer"), "file": "a"}, PASSES)])
        self.addCleanup(setattr, execute, "SANITIZERS", execute.SANITIZERS)
        execute.SANITIZERS = ("no-such-sanitizer",)
        code, results = self.run_all()
        self.assertEqual((code, results["programs"][1]["outcome"]), (0, "skipped"))
        tool = self.folder / "sanitizer"
        tool.write_text(SANITIZES)
        tool.chmod(0o755)
        execute.SANITIZERS = (str(tool),)
        code, results = self.run_all("--again")
        self.assertEqual((code, [entry["outcome"] for entry in results["programs"]]), (0, ["passed", "passed"]))
        self.assertTrue(pathlib.Path(f"{self.seen}.sanitizer").exists())
        tool.write_text("#!/bin/sh\necho '========= Device not supported'\nexit 1\n")
        self.assertEqual(self.run_all("--again")[1]["programs"][1]["outcome"], "skipped")

    def test_a_dry_run_needs_no_gpu_and_adds_its_flags(self):
        self.pack([(program("a", "benchmark", flags=["--large"]), MEASURES)])
        driver.why_no_gpu = lambda: "there is no GPU"
        self.assertEqual(self.run_all("--dry-run")[0], 0, self.errors.getvalue())
        self.assertTrue(self.seen.read_text().endswith("json --large --dry\n"))

    def test_a_file_that_is_no_program_is_a_failure_and_the_others_run(self):
        self.pack([(program("text"), "no program"), (program("good"), PASSES)])
        code, results = self.run_all()
        self.assertEqual((code, [entry["outcome"] for entry in results["programs"]]), (1, ["failed", "passed"]))
        self.assertIn("does not start: ", results["programs"][0]["output_tail"])

    def test_a_program_that_cannot_start_is_a_failure_with_its_text(self):
        self.pack([(program("dies"), DIES)])
        code, results = self.run_all()
        self.assertEqual((code, results["programs"][0]["outcome"]), (1, "failed"))
        self.assertIn("libcudart.so.13: cannot open", self.errors.getvalue())
        self.assertIn("libcudart.so.13: cannot open", (self.folder / "out" / "report.md").read_text())

    def test_peers_are_run_by_python_as_one_rank(self):
        self.pack([({**program("PyTorch FSDP2", "peer"), "file": "peer.py", "flags": ["--impl=fsdp2"]}, "")])
        (self.folder / "peer.py").write_text(
            "import json, os, sys\nprint('a warning')\n"
            "print(json.dumps({'flags': sys.argv[1:], 'step_ms': 7.5, 'world': int(os.environ['WORLD_SIZE'])}))\n")
        code, results = self.run_all()
        self.assertEqual(code, 0, self.errors.getvalue())
        self.assertEqual(results["programs"][0]["cases"][0]["figures"], {"step_ms": 7.5, "world": 1})
        self.assertEqual(self.run_all("--no-peers")[0], 2)

    def test_some_programs_only(self):
        self.pack([(program("one"), PASSES), (program("two"), DIES)])
        code, results = self.run_all("--only=^one$")
        self.assertEqual((code, [entry["name"] for entry in results["programs"]]), (0, ["one"]))
        self.assertEqual(self.run_all("--only=three")[0], 2)
        self.assertIn("there are one, two", self.errors.getvalue())

    def test_a_libtorch_that_does_not_fit_is_refused_before_anything_runs(self):
        self.pack([(program("a"), PASSES)])
        (self.torch / "version.py").write_text("__version__ = '2.10.0+cu130'\n")
        self.assertEqual(self.run_all()[0], 2)
        self.assertIn("has LibTorch 2.10.0+cu130", self.errors.getvalue())
        self.assertFalse(self.seen.exists())

    def test_without_a_gpu_nothing_runs(self):
        self.pack([(program("a"), PASSES)])
        driver.why_no_gpu = lambda: "there is no GPU: look elsewhere"
        self.assertEqual(self.run_all(), (2, None))
        self.assertIn("run: there is no GPU: look elsewhere", self.errors.getvalue())
        self.assertFalse(self.seen.exists())


class LibTorchTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def test_one_without_cuda_is_refused(self):
        with self.assertRaisesRegex(libtorch.NoLibTorch, "not for CUDA"):
            libtorch.check(self.folder)

    def test_the_version_of_an_unpacked_archive(self):
        (self.folder / "lib").mkdir()
        (self.folder / "lib" / "libtorch_cuda.so").touch()
        with self.assertRaisesRegex(libtorch.NoLibTorch, "neither version.py nor build-version"):
            libtorch.check(self.folder)
        (self.folder / "build-version").write_text("2.11.0+cu130\n")
        self.assertEqual(libtorch.check(self.folder), "2.11.0+cu130")
        (self.folder / "build-version").write_text("2.11.0+cu128\n")
        with self.assertRaisesRegex(libtorch.NoLibTorch, "needs one for CUDA 13"):
            libtorch.check(self.folder)

    def test_a_python_without_torch_is_refused(self):
        with self.assertRaisesRegex(libtorch.NoLibTorch, "--libtorch DIR"):
            libtorch.folder_of("/bin/false")
        with self.assertRaisesRegex(libtorch.NoLibTorch, "--libtorch DIR"):
            libtorch.folder_of(str(self.folder / "no-python"))


if __name__ == "__main__":
    unittest.main()
