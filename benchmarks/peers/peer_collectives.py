"""Times Gloo's collectives from Python, as benchmarks/collectives_benchmark.cc does its own.

usage: torchrun --nproc-per-node 2 benchmarks/peers/peer_collectives.py [--bytes 65536,16777216]

In place, one after the other without a barrier between them. Rank 0 prints a line of JSON for each collective and size:
median milliseconds and GB/s of the whole tensor.
"""
import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

SAMPLES = 9
WARMUP = 2
BYTES_PER_SAMPLE = 16 << 20  # small ones are repeated, to be long enough for the clock


def milliseconds(collective, repetitions):
    samples = []
    for _ in range(WARMUP + SAMPLES):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(repetitions):
            collective()
        samples.append((time.perf_counter() - begin) / repetitions * 1e3)
    return statistics.median(samples[WARMUP:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="65536,1048576,16777216,134217728", help="of the whole tensors")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in map(int, args.bytes.split(",")):
        whole = torch.zeros(size // 4 // world * world)
        shard = whole.chunk(world)[rank]
        collectives = {
            "all_gather": lambda w=whole, s=shard: dist.all_gather_into_tensor(w, s),
            "reduce_scatter": lambda w=whole, s=shard: dist.reduce_scatter_tensor(s, w),
            "all_reduce": lambda w=whole: dist.all_reduce(w),
        }
        for name, collective in collectives.items():
            ms = milliseconds(collective, max(1, min(100, BYTES_PER_SAMPLE // size)))
            if rank == 0:
                print(json.dumps({"op": name, "bytes": size, "ranks": world, "ms": ms, "GB/s": size / ms / 1e6}),
                      flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
