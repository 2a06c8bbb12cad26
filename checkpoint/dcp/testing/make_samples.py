#!/usr/bin/env python3
"""Makes the folders of `data`: what torch.distributed.checkpoint.save() writes. Needs torch.

usage: make_samples.py [FOLDER]
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def plain():
    """A model and its optimizer, and dtypes and shapes of all sorts."""
    weight = torch.arange(15, dtype=torch.float32).reshape(3, 5)
    return {"model": {"w": weight, "bf16": torch.arange(4, dtype=torch.bfloat16), "i64": torch.tensor([1 << 40, -1]),
                      "bool": torch.tensor([True, False]), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)},
            "optim": {"state": {"w": {"step": torch.tensor(7.0), "exp_avg": weight + 100}},
                      "param_groups": [{"lr": 0.125, "betas": (0.9, 0.95), "params": ["w"]}]}}


def write_sharded(rank, folder):
    """One of two ranks, as FSDP2 saves: rows; one tensor has fewer rows than ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29731")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    state = {"model": {"w": distribute_tensor(full, mesh, [Shard(0)]),
                       "row": distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)]),
                       "column": DTensor.from_local(full[:, 0:2].clone() if rank == 0 else full[:, 2:4].clone(), mesh,
                                                    [Shard(1)]),
                       "replicated": torch.arange(3)}, "step": 11}
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def main():
    """Writes the folders."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
    dcp.save(plain(), checkpoint_id=os.path.join(folder, "plain"), no_dist=True)
    transposed = {"t": torch.arange(6.0).reshape(2, 3).t()}
    dcp.save(transposed, checkpoint_id=os.path.join(folder, "transposed"), no_dist=True)
    mp.spawn(write_sharded, (os.path.join(folder, "sharded"),), nprocs=2)
    for name in os.listdir(folder):  # globs do not see names that begin with a dot
        os.rename(os.path.join(folder, name, ".metadata"), os.path.join(folder, name, "metadata"))


if __name__ == "__main__":
    main()
