#!/usr/bin/env python3
"""Trains small models with PyTorch's FSDP1, FSDP2 and DDP for //fsdp/tests/parity:pytorch_parity_test to compare with.

usage: tools/record_pytorch_figures.py [--output fsdp/testing/pytorch_figures.txt] [--case NAME ...]

Needs a Python with torch, no GPU: ranks are processes on the CPU over Gloo. Models, initial values and data are those of
fsdp/testing/toy_model.cc and toy_transformer.cc, from the same closed formulas.
"""
import argparse
import dataclasses
import functools
import math
import pathlib
import tempfile
import typing

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
STEPS = 5

# --- fsdp/testing/toy_model.cc ------------------------------------------------

DIM, BLOCKS, ROWS = 7, 3, 4


class Block(nn.Module):

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(DIM, 2 * DIM)
        self.out = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.out(torch.tanh(self.fc(x)))


class Net(nn.Module):

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows(part):
    """Rows of one rank and backward."""
    begin, end = part * ROWS * DIM, (part + 1) * ROWS * DIM
    return (torch.arange(begin, end, dtype=torch.float32) * 0.31).cos().view(ROWS, DIM)


def net_loss(model, part):
    x = rows(part)
    return (model(x) - x.tanh()).square().mean()


@torch.no_grad()
def fill_parameters(module):
    # A tied parameter is written at each of its places.
    for index, (_, parameter) in enumerate(module.named_parameters(remove_duplicate=False), start=1):
        ramp = torch.arange(parameter.numel(), dtype=torch.float32) * 0.7 + index
        parameter.copy_(ramp.sin().mul(0.3).view(parameter.shape))
    return module


# --- fsdp/testing/toy_transformer.cc ------------------------------------------

VOCAB, WIDTH, HEADS, LAYERS, TOKENS, SEQUENCES = 19, 8, 2, 2, 6, 3


class Layer(nn.Module):

    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = [part.view(x.size(0), x.size(1), HEADS, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1)]
        q, k, v = heads
        weights = (q.matmul(k.transpose(2, 3)) / math.sqrt(WIDTH // HEADS)).softmax(-1)
        x = x + self.proj(weights.matmul(v).transpose(1, 2).reshape(x.shape))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class Head(nn.Module):
    """Logits by the weight of the embedding."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


class Transformer(nn.Module):

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = Head(self.embed.weight)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


def sequences(part):
    """Inputs and targets of one rank and backward."""
    begin, end = part * SEQUENCES * (TOKENS + 1), (part + 1) * SEQUENCES * (TOKENS + 1)
    index = torch.arange(begin, end)
    tokens = ((index * index * 7 + index * 3) % VOCAB).view(SEQUENCES, TOKENS + 1)
    return tokens[:, :-1], tokens[:, 1:]


def transformer_loss(model, part):
    tokens, targets = sequences(part)
    return F.cross_entropy(model(tokens).view(-1, VOCAB), targets.reshape(-1))


# --- Cases --------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def freeze_ends(net):
    for part in (net.embed, net.blocks[1]):
        part.requires_grad_(False)


@dataclasses.dataclass
class Case:
    """What pytorch_parity_test.cc does under the same name."""
    model: type = Net
    loss: typing.Callable = net_loss
    unit: type = Block
    optimizer: typing.Callable = sgd
    prepare: typing.Callable = lambda net: None
    clip: typing.Optional[tuple] = None  # max_norm, norm_type
    backwards: int = 1  # per step, all but the last without synchronisation
    bf16: bool = False
    hybrid: bool = False  # half of the ranks shard, two replicas
    worlds: tuple = (2, 4)
    implementations: tuple = ("fsdp1", "fsdp2", "ddp")


TRANSFORMER = {"model": Transformer, "loss": transformer_loss, "unit": Layer}
CASES = {
    "mlp_sgd": Case(),
    "mlp_adamw": Case(optimizer=adamw),
    "clip_2": Case(clip=(0.05, 2.0)),
    "clip_inf": Case(clip=(0.01, math.inf)),
    "no_sync": Case(optimizer=adamw, backwards=3),
    "bf16": Case(bf16=True, implementations=("fsdp1", "fsdp2")),
    "frozen": Case(optimizer=adamw, prepare=freeze_ends),
    "transformer_sgd": Case(**TRANSFORMER),
    "transformer_adamw": Case(**TRANSFORMER, optimizer=adamw),
    "transformer_clip": Case(**TRANSFORMER, clip=(0.2, 2.0)),
    "hybrid": Case(hybrid=True, worlds=(4,), implementations=("fsdp1", "fsdp2")),
}


class Fsdp1:

    def __init__(self, net, case, mesh):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.bf16 else None
        strategy = ShardingStrategy.HYBRID_SHARD if case.hybrid else ShardingStrategy.FULL_SHARD
        self.module = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({case.unit}), device_mesh=mesh,
                                               device_id=torch.device("cpu"), mixed_precision=precision,
                                               sharding_strategy=strategy, use_orig_params=True)

    def backward(self, loss_of_part, synchronizes):
        if synchronizes:
            loss = loss_of_part()
            loss.backward()
            return loss
        with self.module.no_sync():
            loss = loss_of_part()
            loss.backward()
            return loss

    def clip(self, max_norm, norm_type):
        return self.module.clip_grad_norm_(max_norm, norm_type)


class Ddp(Fsdp1):

    def __init__(self, net, case, mesh):  # pylint: disable=super-init-not-called
        self.module = nn.parallel.DistributedDataParallel(net)

    def clip(self, max_norm, norm_type):
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)


class Fsdp2:

    def __init__(self, net, case, mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.bf16 \
            else MixedPrecisionPolicy()
        for module in net.modules():
            if isinstance(module, case.unit):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        self.module = fully_shard(net, mesh=mesh, mp_policy=policy)

    def backward(self, loss_of_part, synchronizes):
        self.module.set_requires_gradient_sync(synchronizes)
        loss = loss_of_part()
        loss.backward()
        return loss

    def clip(self, max_norm, norm_type):
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type).full_tensor()


IMPLEMENTATIONS = {"fsdp1": Fsdp1, "fsdp2": Fsdp2, "ddp": Ddp}


def train(case, implementation, rank, world):
    """Mean losses over ranks and, where gradients are clipped, their norms."""
    net = fill_parameters(case.model())
    case.prepare(net)
    shape, names = ((2, world // 2), ("replicate", "shard")) if case.hybrid else ((world,), ("shard",))
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = IMPLEMENTATIONS[implementation](net, case, mesh)
    optimizer = case.optimizer(model.module.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = torch.zeros((), dtype=torch.float64)
        for i in range(case.backwards):
            part = (step * case.backwards + i) * world + rank
            loss_of_part = functools.partial(lambda part: case.loss(model.module, part) / case.backwards, part)
            mean += model.backward(loss_of_part, i + 1 == case.backwards).detach().double() / world
        if case.clip:
            norms.append(model.clip(*case.clip).item())
        optimizer.step()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses, norms


def run_rank(rank, world, folder, names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    lines = []
    for name in names:
        case = CASES[name]
        if world not in case.worlds:
            continue
        for implementation in case.implementations:
            losses, norms = train(case, implementation, rank, world)
            for quantity, values in (("loss", losses), ("norm", norms)):
                if values:
                    lines.append(" ".join([name, implementation, str(world), quantity, *map("{:.9g}".format, values)]))
    if rank == 0:
        pathlib.Path(folder, f"lines{world}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=REPOSITORY / "fsdp/testing/pytorch_figures.txt", type=pathlib.Path)
    parser.add_argument("--case", action="append", choices=CASES, help="only these, for a look at them")
    args = parser.parse_args()

    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4):
            torch.multiprocessing.spawn(run_rank, (world, folder, args.case or list(CASES)), nprocs=world)
            lines += pathlib.Path(folder, f"lines{world}").read_text(encoding="utf-8").splitlines()
    header = [f"# PyTorch {torch.__version__.split('+')[0]} on the CPU over Gloo, by tools/record_pytorch_figures.py.",
              "# case implementation ranks quantity, then the values of each step"]
    args.output.write_text("\n".join(header + lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
