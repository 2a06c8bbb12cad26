"""Trains the model of a Hugging Face config.json with transformers and PyTorch: by FSDP2 on N ranks over Gloo, or alone.

usage: torchrun --nproc-per-node 2 benchmarks/peers/peer_llama.py CONFIG.json [--seq 128 --batch 8 --steps 10 ...]

As //examples/llama:train does: random parameters, AdamW (fused), gradients clipped to 1; tokens are random. `--batch` is
of all ranks. Rank 0 prints one JSON line: tokens/s of all ranks, median seconds of a step, peak memory of a rank.
"""
import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WARMUP = 3  # steps that are not timed


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    return parser.parse_args()


def make_model(args, ranks):
    config = transformers.AutoConfig.from_pretrained(args.config)
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if ranks == 1 and args.precision == "fp32":
        return model
    policy = MixedPrecisionPolicy()
    if args.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def main():
    args = flags()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(args.threads)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(1)
    model = make_model(args, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(rank)
    seconds = []
    for _ in range(WARMUP + args.steps):
        begin = time.perf_counter()
        tokens = torch.randint(model.config.vocab_size, (args.batch // ranks, args.seq), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[WARMUP:])
    if rank == 0:
        print(json.dumps({"tokens_per_second": args.batch * args.seq / median, "seconds": median,
                          "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
