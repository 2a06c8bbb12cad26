#!/usr/bin/env python3
"""Tests of the whole program with contenders that are small scripts."""
import csv
import json
import os
import pathlib
import re
import select
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

import tables

PEERS = pathlib.Path(__file__).resolve().parent / "peers.py"
DEADLINE = 120
ALL = ["ours", "ours_gloo", "floor", "ddp", "fsdp1", "fsdp2", "ours_twice"]

# Writes what testing/gpt:train does; $TRAIN_HOOK runs first, with the flags. Without --init it is watched for memory.
TRAIN = """#!/bin/sh
init= ms=100 losses="5.5, 5.25, 5.0, 4.75"
for flag in "$@"; do
  case "$flag" in
    --json=*) json=${flag#--json=} ;;
    --init=*) init=yes ;;
    --save-init=*) init=yes; echo parameters > "${flag#--save-init=}"; exit ;;
    --sharding=none) ms=80 losses=${FLOOR_LOSSES:-5.5, 5.26, 5.1, 4.8} ;;
    --seq=*) params=$((25000000 + ${flag#--seq=})) ;;
  esac
done
[ "$WORLD_SIZE" != 4 ] || ms=220
eval "$TRAIN_HOOK"
[ -n "$init" ] || sleep 0.3
[ "${RANK:-0}" != 0 ] || echo '{"step_ms": '$ms', "params": '$params', "loss_rank0": ['"$losses"']}' > "$json"
"""
# A Python with torch, for peer_gpt.py and peer_collectives.py; rank 1 says nothing.
PYTHON = """#!/bin/sh
case "$1" in
  -c) echo 2.11.0+cpu; exit ;;
  */peer_collectives.py)
    [ "$RANK" = 1 ] || echo '{"op": "all_gather", "bytes": 16777216, "ranks": 2, "ms": 16}'
    exit ;;
esac
for flag in "$@"; do case "$flag" in --seq=*) params=$((25000000 + ${flag#--seq=})) ;; esac; done
eval "$PYTHON_HOOK"
case "$*" in *--init=*) ;; *) sleep 0.3 ;; esac
[ "$RANK" = 1 ] || echo '{"step_ms": 300, "params": '$params', "loss_rank0": ['"${LOSSES:-5.5, 5.25, 5.0, 4.75}"']}'
"""
COLLECTIVES = """#!/bin/sh
echo '{"benchmarks": [{"name": "AllGather/local/16777216", "real_time": 2, "time_unit": "ms", "of_memcpy": 0.5}]}'
"""


class PeersTest(unittest.TestCase):

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.train = self.script("train", TRAIN)
        self.python = self.script("python", PYTHON)
        self.document = self.folder / "performance.md"
        parts = ["# Figures"]
        for name in ("peers", "collectives"):
            parts += "\nold\n".join(tables.markers(name)).split("\n")
        self.document.write_text("\n".join([*parts, "end", ""]))

    def script(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run_peers(self, *flags, **env):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("BUILD_", "PEERS_"))}
        return subprocess.run(
            [sys.executable, str(PEERS), f"--train={self.train}", "--mode=opt", *flags], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=DEADLINE, check=False,
            env={**inherited, "PEERS_PYTHON": str(self.python), **env})

    def test_everything(self):
        files = [self.folder / name for name in ("out.json", "out.csv", "out.svg")]
        done = self.run_peers("--rounds=3", f"--document={self.document}", *map("--{0[0]}={0[1]}".format, zip(
            ("json", "csv", "svg"), files)))
        self.assertEqual(done.returncode, 0, done.stderr)

        for line in (r"\| \*\*libtorch_fsdp\*\* +\| 100 ms \(100-100\)", r"\| PyTorch FSDP2 +\| 300 ms",
                     r"step: ours / floor +\| 1.25 \(1.25-1.25\) +\| <= 1.03 \*\*no\*\*",
                     r"step: FSDP2 / ours +\| 3.00 \(3.00-3.00\) +\| >= 2.60 yes", r"2 x ours\) +\| 1.10 .*yes"):
            self.assertRegex(done.stdout, line)
        report = json.loads(files[0].read_text())
        self.assertEqual([entry["contender"] for entry in report["contenders"][::2]], ALL)
        self.assertEqual(report["contenders"][0]["step_ms"], [100.0] * 3)
        self.assertGreater(report["contenders"][0]["pss_bytes"], 0)
        with open(files[1], encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), len(ALL) * 2 * (3 + 1))
        self.assertEqual(files[2].read_text(), (self.folder / "peers.svg").read_text())
        xml.etree.ElementTree.parse(files[2])

        text = self.document.read_text()
        self.assertRegex(text, r"^# Figures\n<!-- peers:begin")
        self.assertIn("| **libtorch_fsdp** | 100 ms (100-100) |", text)
        self.assertIn("![Step times and memory of all contenders](peers.svg)\n<!-- peers:end -->", text)
        self.assertIn("\nold\n<!-- collectives:end -->\nend\n", text)

    def test_contenders_take_turns(self):
        log = self.folder / "log"
        done = self.run_peers("--rounds=2", "--shapes=1x64", "--no-memory", "--contenders=ours,ours_gloo,fsdp2",
                              TRAIN_HOOK=f'[ $RANK = 1 ] || echo "$1" >> {log}', PYTHON_HOOK=f'[ $RANK = 1 ] || echo "$2" >> {log}')
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(log.read_text().split(), ["--backend=auto", "--backend=gloo", "--impl=fsdp2"] * 2)
        self.assertRegex(done.stderr, r"\[1/6\] batch 1 x seq 64, round 1 of 2, libtorch_fsdp: 100.0 ms +\(\d+ s left")
        self.assertRegex(done.stderr, r"\[6/6\] .*FSDP2: 300.0 ms\n")

    def test_the_floor_is_two_processes_at_the_same_time(self):
        # Each waits for the other to open the other end.
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        hook = f'if mkdir {self.folder}/first 2>/dev/null; then echo hi > {fifo}; else read line < {fifo}; fi'
        done = self.run_peers("--rounds=1", "--shapes=1x64", "--no-memory", "--contenders=floor", TRAIN_HOOK=hook)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("80.0 ms", done.stderr)

    def test_variables_of_ranks(self):
        log = self.folder / "log"
        hook = f'echo $RANK $WORLD_SIZE $MASTER_ADDR $OMP_NUM_THREADS $((MASTER_PORT > 0)) >> {log}'
        done = self.run_peers("--rounds=1", "--shapes=1x64", "--no-memory", "--contenders=ours,ddp", PYTHON_HOOK=hook,
                              TRAIN_HOOK=hook, RANK="7", SLURM_PROCID="3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(log.read_text().splitlines()), ["0 2 127.0.0.1 1 1"] * 2 + ["1 2 127.0.0.1 1 1"] * 2)

    def test_other_losses_end_the_run(self):
        done = self.run_peers("--quick", "--write-table", f"--document={self.document}", LOSSES="5.5, 5.25, 5.01, 4.75")
        self.assertEqual(done.returncode, 1)
        self.assertIn("PyTorch DDP (batch 1 x seq 64) does not train as libtorch_fsdp does: the loss of step 3 is 5.01 "
                      "instead of 5", done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertIn("\nold\n<!-- peers:end", self.document.read_text())

    def test_other_models_end_the_run(self):
        done = self.run_peers("--quick", PYTHON_HOOK="params=7")
        self.assertEqual(done.returncode, 1)
        self.assertIn("PyTorch DDP trains 7 parameters, libtorch_fsdp 25,000,064", done.stderr)

    def test_of_the_floor_the_first_loss_counts(self):
        done = self.run_peers("--quick", "--no-memory", "--no-peers", FLOOR_LOSSES="5.6, 5.25, 5.0, 4.75")
        self.assertEqual(done.returncode, 1)
        self.assertIn("does not train as libtorch_fsdp does: the loss of step 1 is 5.6 instead of 5.5", done.stderr)

    def test_a_contender_that_fails(self):
        done = self.run_peers("--quick", PYTHON_HOOK="[ $RANK = 0 ] || { echo gloo: refused >&2; exit 5; }; sleep 1000")
        self.assertEqual(done.returncode, 1)
        self.assertIn("PyTorch DDP (batch 1 x seq 64), rank 1 exited with code 5", done.stderr)
        self.assertIn("gloo: refused", done.stderr)

    def test_a_contender_that_hangs(self):
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        with subprocess.Popen([sys.executable, str(PEERS), f"--train={self.train}", "--no-peers", "--deadline=2"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={
                                  **os.environ, "TRAIN_HOOK": f"[ $RANK = 0 ] || exec sleep 1000; sleep 1000 & echo $! > {fifo}; wait"}) as peers:
            child = os.pidfd_open(int(fifo.read_text()))
            self.addCleanup(os.close, child)
            _, errors = peers.communicate(timeout=DEADLINE)
        self.assertEqual(peers.returncode, 1)
        self.assertIn("libtorch_fsdp (batch 1 x seq 64), rank 0 did not end within 2 s", errors)
        self.assertTrue(select.select([child], [], [], DEADLINE)[0], "still running")

    def test_a_terminated_run_leaves_nothing(self):
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        with subprocess.Popen([sys.executable, str(PEERS), f"--train={self.train}", "--no-peers"],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={
                                  **os.environ, "TRAIN_HOOK": f"[ $RANK = 0 ] || exec sleep 1000; sleep 1000 & echo $! > {fifo}; wait"}) as peers:
            child = os.pidfd_open(int(fifo.read_text()))
            self.addCleanup(os.close, child)
            peers.terminate()
            self.assertEqual(peers.wait(DEADLINE), 128 + 15)
        self.assertTrue(select.select([child], [], [], DEADLINE)[0], "still running")

    def test_a_report_that_is_none(self):
        done = self.run_peers("--quick", TRAIN_HOOK='echo "{}" > "$json"; exit 0')
        self.assertEqual(done.returncode, 1)
        self.assertIn("libtorch_fsdp: expected a line of JSON with step_ms", done.stderr)
        done = self.run_peers("--quick", TRAIN_HOOK="exit 0")
        self.assertIn("libtorch_fsdp ended well but did not write", done.stderr)

    def test_without_torch_ours_are_measured(self):
        done = self.run_peers("--quick", "--no-memory", f"--document={self.document}", PEERS_PYTHON="/no/python")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("WITHOUT PyTorch's DDP, FSDP1 and FSDP2: PEERS_PYTHON=/no/python cannot import torch",
                      done.stderr)
        self.assertIn("libtorch_fsdp over Gloo", done.stdout)
        self.assertNotIn("FSDP2", done.stdout)
        self.assertIn(f"{self.document} stays as it is (--quick)", done.stderr)
        self.assertIn("\nold\n<!-- peers:end", self.document.read_text())

    def test_a_document_without_place_is_found_before_anything_runs(self):
        self.document.write_text("nothing")
        done = self.run_peers("--write-table", f"--document={self.document}", TRAIN_HOOK="exit 9")
        self.assertEqual(done.returncode, 1)
        self.assertIn("performance.md: expected one line '<!-- peers:begin", done.stderr)

    def test_collectives(self):
        program = self.script("collectives", COLLECTIVES)
        done = self.run_peers("--collectives", f"--collectives-program={program}", "--rounds=2",
                              f"--document={self.document}", f"--json={self.folder}/c.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"all-gather: local +\| +\| +\| 8.39 +\| 0.50 +\| 8.0 \(8.0-8.0\)")
        self.assertIn("| all-gather: local |  |  | 8.39 | 0.50 |", self.document.read_text())
        self.assertIn("\nold\n<!-- peers:end", self.document.read_text())
        self.assertEqual(len(json.loads((self.folder / "c.json").read_text())["rounds"]), 4)

    def test_flags(self):
        for flag, error in [("--rounds=0", "a number from 1"), ("--shapes=2x2", "there is no '2x2'"),
                            ("--contenders=theirs", "there is no 'theirs'; choose from ours,"),
                            ("--warmup=-1", "a number from 0"), ("--write-table", "--document=FILE"),
                            ("--collectives --ranks=4", "times 2")]:
            done = self.run_peers(*flag.split())
            self.assertEqual(done.returncode, 2)
            self.assertIn(error, done.stderr)

    def test_help_names_every_flag(self):
        done = self.run_peers("--help")
        self.assertEqual(done.returncode, 0)
        declared = set(re.findall(r'add_argument\("(--[a-z-]+)"', PEERS.read_text()))
        self.assertGreater(len(declared), 15)
        self.assertEqual([flag for flag in declared if flag not in done.stdout], [])


if __name__ == "__main__":
    unittest.main()
