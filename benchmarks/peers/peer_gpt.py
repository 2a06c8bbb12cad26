"""Trains the GPT of testing/gpt with a Python data parallelism on N CPU ranks over Gloo, or on a GPU each over NCCL.

usage: torchrun --nproc-per-node 2 benchmarks/peers/peer_gpt.py --impl fsdp1|fsdp2|ddp|none [--layers 8 --dim 512 ...]

The data are the rows of `Batches` in testing/gpt/batches.h. Rank 0 prints one JSON line: tokens/s of all ranks,
median and least milliseconds per step, the host's part until all is queued, peak memory of a rank (with --device cuda
the GPU's, too, within the timed steps), first and last loss; with --losses rank 0's loss of every step.
"""
import json
import os
import resource
import statistics
import struct
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import peer_flags


class Block(nn.Module):

    def __init__(self, dim, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)
        self.heads = heads

    def forward(self, x):
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, dim)
        x = x + self.proj(y)
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab, dim, layers, heads, seq):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def load_safetensors(path):
    """The float32 tensors of a folder that `train --save-init` has written."""
    with open(os.path.join(path, "model.safetensors"), "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F32", f"{name} is {entry['dtype']}"
        begin, end = entry["data_offsets"]
        tensors[name] = torch.frombuffer(data[begin:end], dtype=torch.float32).view(entry["shape"])
    return tensors


def make_model(args):
    """On the device, which also draws the initial values: the host takes seconds for a billion."""
    torch.manual_seed(0)
    with torch.device(args.place):
        model = GPT(args.vocab, args.dim, args.layers, args.heads, args.seq)
    if args.init:
        model.load_state_dict(load_safetensors(args.init))
    model.to(device=args.place, dtype=torch.bfloat16 if args.pure_bf16 else torch.float32)
    if args.recompute:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, preserve_rng_state=False)
    return model


def wrap(model, args, world):
    """`model` as --impl asks for."""
    if args.impl == "none":
        return model
    if args.impl == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if args.impl == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}),
                                        device_id=args.place, mixed_precision=precision,
                                        use_orig_params=False)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    mesh = dist.init_device_mesh(args.device, (world,))
    policies = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16
                     else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=args.device == "cuda") if args.cpu_offload else OffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policies)
    return fully_shard(model, mesh=mesh, **policies)


def barrier():
    if dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def clip(model, norm):
    if hasattr(model, "clip_grad_norm_"):  # FSDP1's own
        model.clip_grad_norm_(norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), norm)


def step(model, optimizer, batches, args):
    """The first loss."""
    first = None
    for rows in batches:
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().view(-1, args.vocab), rows[:, 1:].reshape(-1))
        (loss / len(batches) if len(batches) > 1 else loss).backward()
        first = loss.detach() if first is None else first
    if args.clip:
        clip(model, args.clip)
    if not args.no_optim:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return first


def train(model, args, rank):
    """Seconds, the host's part of them and the loss of every step, warm-up included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    generator = torch.Generator().manual_seed(1234 + rank)
    seconds, host, losses = [], [], []
    for index in range(args.warmup + args.steps):
        batches = []
        for _ in range(args.micro_batches):
            rows = torch.randint(0, args.vocab, (args.batch, args.seq + 1), generator=generator)
            rows[:, 1:] = (rows[:, :1] + torch.arange(1, args.seq + 1)) % args.vocab
            batches.append(rows.to(args.place))
        barrier()
        if index == args.warmup and args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = step(model, optimizer, batches, args)
        host.append(time.perf_counter() - begin)
        barrier()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return seconds, host, losses


def main():
    args = peer_flags.parse(sys.argv[1:], __doc__)
    args.place = torch.device("cpu")
    if args.device == "cuda":
        args.place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(args.place)

    if args.threads > 0:
        torch.set_num_threads(args.threads)
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if args.impl != "none":
        # What rests in the host's memory is clipped there.
        gpu = "cpu:gloo,cuda:nccl" if args.cpu_offload else "nccl"
        dist.init_process_group(gpu if args.device == "cuda" else "gloo")
    model = make_model(args)
    num_parameters = sum(p.numel() for p in model.parameters())
    seconds, host, losses = train(wrap(model, args, world), args, rank)

    timed = seconds[args.warmup:]
    median = statistics.median(timed)
    if rank == 0:
        report = dict(impl=args.impl, world=world, params=num_parameters, bf16=args.bf16, batch=args.batch,
                      seq=args.seq, step_ms=round(median * 1e3, 2), min_ms=round(min(timed) * 1e3, 2),
                      host_ms=round(statistics.median(host[args.warmup:]) * 1e3, 2),
                      tok_s=round(world * args.batch * args.micro_batches * args.seq / median, 1),
                      peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                      loss0=round(losses[0], 4), loss=round(losses[-1], 4))
        if args.device == "cuda":
            report["peak_device_mb"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
        if args.losses:
            report["loss_rank0"] = losses
        print(json.dumps(report), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
