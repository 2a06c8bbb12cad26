#!/usr/bin/env python3
"""Makes a folder of `data` with torchtitan's own classes, on CPUs: `torchtitan_0_2` or `torchtitan_0_3`, whichever is
installed. Needs torch 2.11 and what torchtitan needs; tried with torchtitan 0.2.2 and 0.3.0.

usage: make_torchtitan_samples.py [FOLDER]

Its training loop needs a GPU. What is used of it: CheckpointManager.save(), ModelWrapper, OptimizersContainer,
LRSchedulersContainer, ParallelAwareDataloader, and, of 0.2, the Llama model; 0.3's asks for a newer torch than 2.11. Two
ranks with gloo, FSDP2. Element i, row-major, of the n-th parameter by name is 1000 n + i; of its exp_avg 0.25 more, of
its exp_avg_sq 0.5 more. 0.2 trains one parameter of them, so that the folder stays small.
"""

import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

STEP = 7
TRAINED_OF_LLAMA = ("output.weight",)
OPTIONS = {"lr": 0.125, "betas": (0.875, 0.75), "eps": 2.0**-20, "weight_decay": 0.0625, "fused": False,
           "foreach": False}


class Numbers(torch.utils.data.IterableDataset):
    """What the data loader's state is of."""

    def __iter__(self):
        return iter(range(10))


class TrainState(Stateful):
    """As torchtitan's Trainer keeps it."""

    def state_dict(self):
        return {"step": torch.tensor(STEP), "ntokens_seen": torch.tensor(1 << 33)}

    def load_state_dict(self, state_dict):
        """There is none to load into."""


class TwoLayers(torch.nn.Module):
    """For 0.3, whose models need a newer torch."""

    def __init__(self):
        super().__init__()
        self.output = torch.nn.Linear(4, 5, bias=False)
        self.norm = torch.nn.RMSNorm(4)


def make_0_2(folder):
    """The model, its optimizers, and what makes the manager of them and of all states."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import Checkpoint
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    # An odd vocabulary, so that the ranks' parts differ.
    model = Transformer(TransformerModelArgs(dim=8, n_layers=1, n_heads=2, vocab_size=5, multiple_of=4, max_seq_len=8))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in TRAINED_OF_LLAMA)

    def manager(states):
        optimizers = OptimizersContainer([model], torch.optim.AdamW, OPTIONS)
        config = Checkpoint(enable=True, interval=1, keep_latest_k=0)
        made = CheckpointManager(
            dataloader=ParallelAwareDataloader(Numbers(), dist.get_rank(), 2), model_parts=[model],
            optimizers=optimizers, lr_schedulers=LRSchedulersContainer(optimizers, lambda step: 1.0), states=states,
            checkpoint_config=config, sd_adapter=None, base_folder=folder)
        return made, optimizers

    return model, list(model.layers.values()), manager


def make_0_3(folder):
    """The same."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
    from torchtitan.components.optimizer import ParamGroupConfig

    model = TwoLayers()

    def manager(states):
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW",
                                 optimizer_kwargs={k: v for k, v in OPTIONS.items() if k not in ("fused", "foreach")})
        optimizers = OptimizersContainer(
            OptimizersContainer.Config(param_groups=[group], implementation="for-loop"), model_parts=[model])
        schedulers = LRSchedulersContainer(optimizers, lambda step: 1.0)
        config = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0)
        made = CheckpointManager(config, dataloader=ParallelAwareDataloader(Numbers(), dist.get_rank(), 2),
                                 model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers, states=states,
                                 sd_adapter=None, base_folder=folder)
        return made, optimizers

    return model, [], manager


def save(rank, folder, make):
    """One of two ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29751")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, units, make_manager = make(folder)
    mesh = init_device_mesh("cpu", (2,))
    for unit in units + [model]:
        fully_shard(unit, mesh=mesh)
    manager, optimizers = make_manager({"train_state": TrainState()})
    names = sorted(name for name, _ in model.named_parameters())

    def values(name, parameter, more):
        numel = parameter.numel()
        full = 1000 * names.index(name) + torch.arange(numel, dtype=torch.float32).reshape(parameter.shape) + more
        return distribute_tensor(full, mesh, [Shard(0)])

    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(values(name, parameter, 0))
        if parameter.requires_grad:
            state = optimizers.optimizers[0].state[parameter]
            state.update(step=torch.tensor(float(STEP)), exp_avg=values(name, parameter, 0.25),
                         exp_avg_sq=values(name, parameter, 0.5))
    manager.save(STEP)
    manager.close()
    dist.destroy_process_group()


def main():
    """Writes the folder."""
    data = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
    try:
        from torchtitan.components import optimizer
    except ImportError:
        sys.exit("torchtitan is needed")
    is_new = hasattr(optimizer, "ParamGroupConfig")
    target = os.path.join(data, "torchtitan_0_3" if is_new else "torchtitan_0_2")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(save, (folder, make_0_3 if is_new else make_0_2), nprocs=2)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(os.path.join(folder, "checkpoint", f"step-{STEP}"), target)
    # Globs do not see names that begin with a dot.
    os.rename(os.path.join(target, ".metadata"), os.path.join(target, "metadata"))


if __name__ == "__main__":
    main()
