#!/usr/bin/env python3
"""Tokens per second of //examples/llama:train beside PyTorch's FSDP2 with transformers' model, in turns on this machine.

usage: benchmarks/peers/llama_peers.py [--train PROGRAM] [--turns 3] [--precision fp32|bf16]

Needs a Python with torch 2.11 and transformers: run this file with it. Builds //examples/llama:train with --config=opt
unless --train names it. Two ranks with a thread each, and one process with two; the same model, batch and precision. A
row for each length of rows, medians of the turns.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import llama_files

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PEER = REPOSITORY / "benchmarks/peers/peer_llama.py"
# 19 million parameters.
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 384,
          "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
          "max_position_embeddings": 4096, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
          "torch_dtype": "float32"}
ROWS = ((32, 2), (64, 4), (256, 4), (512, 4))  # tokens, rows of all ranks
STEPS, WARMUP = 6, 3


def run(command, environment=None):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **(environment or {})}, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} exits with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def ours(args, ranks):
    return [args.train, "--from_scratch", f"--ranks={ranks}"]


def theirs(args, ranks):
    if ranks == 1 and args.precision == "fp32":
        return [sys.executable, PEER]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", PEER, "--impl=fsdp2"]


def rate(program, args, folder, tokens, rows, ranks):
    """Tokens per second of `program`, ours or theirs."""
    metrics, threads = pathlib.Path(f"{folder}.metrics"), 2 // ranks
    metrics.unlink(missing_ok=True)
    run([*program(args, ranks), f"--model={folder}", f"--data={folder}.bin", f"--seq={tokens}", f"--batch={rows}",
         f"--steps={WARMUP + STEPS}", f"--threads={threads}", f"--precision={args.precision}", f"--metrics={metrics}"],
        {"OMP_NUM_THREADS": str(threads)})
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return tokens * rows / statistics.median(line["seconds"] for line in lines[WARMUP:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", help="the program, if it is built already")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    if not args.train:
        subprocess.run([REPOSITORY / "bazelw", "build", "--config=opt", "//examples/llama:train"], cwd=REPOSITORY,
                       check=True)
        args.train = REPOSITORY / "bazel-bin/examples/llama/train"
    contenders = {"ours, 2 ranks": (ours, 2), "FSDP2, 2 ranks": (theirs, 2), "ours, 1 rank": (ours, 1),
                  "PyTorch, 1 process": (theirs, 1)}
    with tempfile.TemporaryDirectory() as scratch:
        print(f"| tokens x rows | {' | '.join(contenders)} | ours / FSDP2 | 2 ranks / 1 rank |", flush=True)
        print("|---" * (len(contenders) + 3) + "|", flush=True)
        for tokens, rows in ROWS:
            folder = f"{scratch}/{tokens}x{rows}"
            llama_files.write(folder, CONFIG, rows, tokens, weights=False)
            figures = {name: [] for name in contenders}
            for _ in range(args.turns):
                for name, (program, ranks) in contenders.items():
                    figures[name].append(rate(program, args, folder, tokens, rows, ranks))
            medians = [statistics.median(figures[name]) for name in contenders]
            print(f"| {tokens} x {rows} | {' | '.join(f'{median:.0f}' for median in medians)} | "
                  f"{medians[0] / medians[1]:.2f} | {medians[0] / medians[2]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
