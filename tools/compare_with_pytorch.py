#!/usr/bin/env python3
"""Compares training with this library to PyTorch's FSDP: rank 0's losses from the same initial parameters.

usage: tools/compare_with_pytorch.py [--impl fsdp1|fsdp2|ddp] [--ranks 2] [--steps 10] [--train PROGRAM]

Needs a Python with torch 2.11.0, the LibTorch that this repository builds with: run this file with it. Builds
//testing/gpt:train unless --train names it. Exits with 0 when all losses agree to a relative 1e-5.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TOLERANCE = 1e-5
MODEL = ["--layers=3", "--dim=64", "--heads=4", "--seq=32", "--batch=4", "--vocab=101", "--threads=1", "--warmup=0"]


def run(command, **kwargs):
    """The standard output of a command; exits where it fails."""
    print("+", " ".join(map(str, command)), flush=True)
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, **kwargs)
    if done.returncode != 0:
        sys.exit(f"failed with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def train_program(args):
    if args.train:
        return pathlib.Path(args.train).resolve()
    run([REPOSITORY / "bazelw", "build", "//testing/gpt:train"], cwd=REPOSITORY)
    return REPOSITORY / "bazel-bin/testing/gpt/train"


def peer_losses(args, init):
    """Rank 0's losses from the line that the peer prints."""
    output = run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                  f"--nproc-per-node={args.ranks}",
                  REPOSITORY / "benchmarks/peers/peer_gpt.py", f"--impl={args.impl}", f"--steps={args.steps}",
                  f"--init={init}", "--losses", *MODEL], env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])["loss_rank0"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", default="fsdp1", choices=["fsdp1", "fsdp2", "ddp"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--train", help="the program, if it is built already")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        init = pathlib.Path(folder) / "init"
        report = pathlib.Path(folder) / "report.json"
        run([train_program(args), "--backend=gloo", f"--ranks={args.ranks}", f"--steps={args.steps}",
             f"--save-init={init}", f"--json={report}", "--seed=7", *MODEL])
        ours = json.loads(report.read_text())["loss_rank0"]
        theirs = peer_losses(args, init)

    print(f"{'step':>4} {'ours':>12} {args.impl:>12} {'relative':>10}")
    worst = 0.0
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        difference = abs(a - b) / abs(b)
        worst = max(worst, difference)
        print(f"{step:4} {a:12.7f} {b:12.7f} {difference:10.1e}")
    agree = worst <= TOLERANCE
    print(f"{'agree' if agree else 'DIFFER'}: at most {worst:.1e} apart, {TOLERANCE:.0e} allowed")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
