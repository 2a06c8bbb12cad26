"""torch.distributed.checkpoint of the model of //benchmarks:checkpoint_benchmark: 2 GB, FSDP2, two ranks over Gloo.

usage: peer_checkpoint.py DIRECTORY [TURNS]

Prints the median seconds of a save, fsync included, and of a load of what is not in the page cache.
"""

import os
import shutil
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

RANKS = 2
DIM = 4096
LAYERS = 32


def forget(folder):
    for name in os.listdir(folder):
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work):
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def run(rank, folder, turns):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29631")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    saves, loads = [], []
    for _ in range(turns):
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        saves.append(timed(lambda: dcp.save(model.state_dict(), checkpoint_id=folder)))
        if rank == 0:
            forget(folder)
        loads.append(timed(lambda: dcp.load(model.state_dict(), checkpoint_id=folder)))
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        size = LAYERS * DIM * DIM * 4 / 1e9
        for name, seconds in (("save", saves), ("load", loads)):
            median = statistics.median(seconds)
            print(f"{name}: {median:.2f} s, {size / median:.2f} GB/s (median of {turns}: "
                  f"{', '.join(f'{one:.2f}' for one in seconds)})")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    mp.spawn(run, args=(os.path.join(sys.argv[1], "dcp_checkpoint"), int(sys.argv[2]) if len(sys.argv) > 2 else 3),
             nprocs=RANKS)
