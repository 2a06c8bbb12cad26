#!/usr/bin/env python3
"""A dry run: the benchmarks on the fake device, the Llama programs and a test of the CPU in the place of those for a GPU, and as
PyTorch's side a program that only reads its flags, or the real one if PEERS_PYTHON is a Python that has torch.

usage: pack_test.py GPU_BENCHMARKS_DRY DEVICE_OPS_BENCHMARK TRAIN GENERATE A_TEST
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import pack

FILES = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
TESTS = [*pack.FIRST_TESTS, "//a/b:last_test"]
SMOKE = "third_party/cuda:smoke_test"
RUNS = "#!/bin/sh\necho '[ RUN      ] A.B'\n"
SCRIPTS = {
    "out/bin/third_party.cuda.smoke_test": RUNS + "echo begun\nsleep 600\n",
    "compute-sanitizer": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    "python": f"#!{sys.executable}\n" + """
import json, pathlib, sys
program, argv = pathlib.Path(sys.argv[1]), sys.argv[2:]
sys.path.insert(0, str(program.parent))
import peer_flags
if program.name == 'peer_gpt.py':
    assert peer_flags.parse(argv, '').layers == 2
    print('{"step_ms": 2.5, "tok_s": 1000.5}')
    sys.exit()
args = peer_flags.parse_llama(argv, '')
assert pathlib.Path(args.model, 'config.json').exists()
if args.max_tokens:
    print('then: 256 tokens in 0.25 s (1024 tokens/s)')
else:
    assert pathlib.Path(args.data).stat().st_size == 4 * (args.batch * args.seq + 1)
    line = {"loss": 5.5, "tokens": 32, "seconds": 0.5, "tokens_per_second": 64, "peak_allocated_mib": 7, "peak_reserved_mib": 9}
    pathlib.Path(args.metrics).write_text(args.steps * (json.dumps(line) + '\\n'))
"""}


class PackTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def write(self, name, text):
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run_suite(self, *flags):
        """Its exit code, what it prints, {program: result}, the report."""
        said = subprocess.run(["ldd", *FILES], stdout=subprocess.PIPE, text=True, check=True).stdout
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GTEST_FILTER": "PackTest.N*:PackTest.R*",
                       "PATH": f"{self.folder}:{os.environ['PATH']}",
                       "LD_LIBRARY_PATH": ":".join(sorted(set(re.findall(r"=> (/(?!lib|usr/lib)\S+)/", said))))}
        done = subprocess.run([sys.executable, self.folder / "out" / "run", "--dry-run", f"--out={self.folder}/results",
                               f"--python={os.environ.get('PEERS_PYTHON') or self.folder / 'python'}", *flags],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False)
        results = json.loads((self.folder / "results" / "results.json").read_text())["programs"]
        return (done.returncode, done.stdout, {one["name"]: one for one in results},
                (self.folder / "results" / "report.md").read_text())

    def test_runs_go_on_until_nothing_is_left(self):
        labels = [pack.GPU_BENCHMARKS, pack.DEVICE_OPS, pack.TRAIN, pack.GENERATE]
        pack.fill(self.folder / "out", {**dict(zip(labels, FILES)), **dict.fromkeys(TESTS, FILES[-1])}, sources="abc", build="")
        for name, text in SCRIPTS.items():
            self.write(name, text)
        code, said, results, report = self.run_suite("--budget=13")
        self.assertEqual((code, len(results), results[SMOKE]["outcome"]), (1, 1, pack.CUT_OFF), said)
        self.assertIn("  - A.B\n\n    ```\n    begun\n    has not ended\n", report)
        self.assertIn(f"`--out`: {SMOKE}, device_ops/cuda:operators_test, ", report)

        self.write("out/bin/third_party.cuda.smoke_test", RUNS + "echo x.cc:3\necho '[  FAILED  ] A.B (3 ms)'\nexit 1\n")
        code, said, results, report = self.run_suite()
        good = (pack.PASSED, pack.SKIPPED)
        self.assertEqual((code, {name for name, one in results.items() if one["outcome"] not in good}), (1, {SMOKE}), report)
        llamas = [f"Llama {group}: {row}" for group, (_, rows) in pack.BESIDE_TRANSFORMERS.items() for row in rows]
        skipped = {name for name, one in results.items() if one["outcome"] == pack.SKIPPED}
        self.assertLessEqual(skipped, {name for name in llamas if "captured" in name or "offload" in name})
        self.assertIn("1 of them failed.", report)
        self.assertNotIn("Not run", report)
        self.assertIn("  - A.B\n\n    ```\n    x.cc:3\n    ```\n", report)
        names = [*(label[2:] for label in TESTS), "operators_test under compute-sanitizer", "llama: train", "llama: generate",
                 *pack.CASES, "device_ops", *pack.PYTORCH]
        self.assertEqual(list(results)[:len(names) + 1], [*names, "Llama 1.2B: ours"])
        self.assertEqual(list(results)[-1], "Llama 1.2B, generating 64 rows: ours, again")
        self.assertLessEqual(set(llamas), set(results))
        self.assertEqual(len(results["a/b:last_test"]["cases"]), 2)
        beside, _, llama = report.partition("## Beside PyTorch")[2].partition("## All figures")[0].partition("## Llama beside")
        self.assertEqual(set(re.findall(r"^\| \S+ \| ([^|]+) \| [\d.]", beside, re.MULTILINE)),
                         {"ours", "plain LibTorch", *pack.PYTORCH}, report)
        self.assertRegex(report, r"\| last_loss \| tokens_per_s \| .*\n.*\n\| llama: train \| [1-9]\.\d+ \| [\d.,]+ \| ")
        self.assertEqual({f"Llama {group}: {row}" for group, row in re.findall(r"^\| (\S+B[^|]*) \| ([^|]+) \| [\d.| ]*\d", llama,
                                                                             re.MULTILINE)} | skipped, set(results) - set(names))
        for bound in ("1.2B | tokens_per_s over FSDP2, compiled | >= 1.05",
                      "1.2B, generating 8 rows | tokens_per_s over transformers | >= 1.5"):
            self.assertRegex(llama, rf"\n\| {re.escape(bound)} \| [\d.,]+ \| (not )?met \|\n")
        if os.environ.get("PEERS_PYTHON"):  # The weights, the rows and the optimizer are the same.
            losses = [results[f"Llama 1.2B: {row}"]["cases"][0]["figures"]["loss_3"] for row in ("ours", "FSDP2")]
            self.assertAlmostEqual(*losses, places=4)
        self.assertRegex(report, r"tokens_per_s \|\n.*\n\| llama: generate \| [\d.,]+ \|\n")

        self.write("out/bin/third_party.cuda.smoke_test", RUNS + "echo '[       OK ] A.B (3 ms)'\n")
        self.assertEqual(self.run_suite()[0], 1)  # What has failed does not run again unasked.
        code, said, _, report = self.run_suite("--only=smoke_test")
        self.assertEqual((code, "What failed" in report), (0, False), said)
        self.assertEqual(self.run_suite()[:2], (0, f"{self.folder}/results/report.md\n"))

    def test_the_worse_of_both_runs_is_held_to_a_bound(self):
        def verdicts(**figures):
            found = {f"Llama 1.2B: {row.replace('_', ' ')}": dict(zip(("tokens_per_s", "peak_allocated_mib"), values))
                     for row, values in figures.items()}
            return [bound[-2:] for bound in pack.bounds({name.replace("FSDP2", "FSDP2, compiled").replace(
                "ours again", pack.AGAIN): values for name, values in found.items()})][:2]

        self.assertEqual(verdicts(ours=(210, 75), FSDP2=(200, 100)), [(1.05, "met"), (0.75, "met")])
        self.assertEqual(verdicts(ours=(220, 70), ours_again=(200, 80), FSDP2=(200, 100)), [(1, "not met"), (0.8, "not met")])
        self.assertEqual(verdicts(ours=(220,), FSDP2=(200, 100)), [(1.1, "met"), ("", "not run")])
        self.assertEqual(verdicts(FSDP2=(200, 100)), [("", "not run")] * 2)

    def test_libraries_that_the_other_machine_may_lack(self):
        needed = " 0x1 (NEEDED)  Shared library: [libtorch_cuda.so]\n 0x1 (NEEDED)  Shared library: [liburing.so.2]\n"
        self.assertEqual(pack.foreign_libraries(needed), ["liburing.so.2"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
