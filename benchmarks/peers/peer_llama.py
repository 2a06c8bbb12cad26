"""Trains a Llama, or generates with it, by transformers: plain, by FSDP2, or with PEFT's adapters.

usage: [torchrun --nproc-per-node 2] benchmarks/peers/peer_llama.py --model=FOLDER --data=TOKENS.bin --metrics=FILE ...

Flags and the lines of --metrics are those of //examples/llama:train. Every step trains on the same rows, the first
--batch of the file, whose order //examples/llama:train changes: where the file has no more, its losses are the same.
bf16 is over float32 shards with --impl=fsdp2; else parameters, adapters and states are bf16, too, which is PyTorch's
fastest. With --max_tokens it generates, and prints the rate as //examples/llama:generate does, of all rows.
"""
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
import transformers

import peer_flags


def load(args, dtype):
    """On the device; with random values where the folder has no weights."""
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if any(pathlib.Path(args.model).glob("*.safetensors")):
        return transformers.AutoModelForCausalLM.from_pretrained(args.model, **options).to(args.place)
    with torch.device(args.place):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(args.model), **options)


def make_model(args):
    sharded = args.impl == "fsdp2"
    model = load(args, torch.float32 if sharded or args.precision == "fp32" else torch.bfloat16)
    model.config.use_cache = False
    if args.lora_rank:
        import peft
        adapters = peft.LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules="all-linear",
                                   task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model.train()
    if sharded:
        return shard(model, args)
    if args.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def shard(model, args):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy()
    if args.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.model.layers
    for index, layer in enumerate(layers):
        if args.recompute:
            layer = layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
        if args.compile:
            layer.compile(backend=args.compile)
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def make_optimizer(parameters, args):
    """Matrices decay."""
    groups = [{"params": [one for one in parameters if (one.dim() >= 2) == decays], "weight_decay": 0.1 * decays}
              for decays in (True, False)]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=args.lr, betas=(0.9, 0.95), fused=True)


def synchronize(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


def train(model, args, rank, ranks):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters, args)
    data = torch.frombuffer(bytearray(pathlib.Path(args.data).read_bytes()), dtype=torch.int32).long()
    count, mine = args.batch * args.seq, slice(args.batch // ranks * rank, args.batch // ranks * (rank + 1))
    tokens, targets = (data[begin:begin + count].view(args.batch, args.seq)[mine].to(args.place) for begin in (0, 1))
    end = time.perf_counter()
    for step in range(1, args.steps + 1):
        loss = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if ranks > 1:
            dist.all_reduce(loss)
        line = {"step": step, "loss": loss.item() / ranks, "tokens": count}
        synchronize(args)
        begin, end = end, time.perf_counter()
        line.update(seconds=end - begin, tokens_per_second=count / (end - begin))
        if args.device == "cuda":
            line.update(peak_allocated_mib=torch.cuda.max_memory_allocated() >> 20,
                        peak_reserved_mib=torch.cuda.max_memory_reserved() >> 20)
        if rank == 0:
            with open(args.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def generate(args):
    """With a static cache, for which transformers compiles the model on a GPU; the likeliest tokens."""
    model = load(args, torch.float32 if args.precision == "fp32" else torch.bfloat16).eval()
    prompt = torch.tensor([[int(token) for token in args.tokens.split(",")]] * args.batch, device=args.place)
    seconds = []
    for _ in range(5):
        synchronize(args)
        begin = time.perf_counter()
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
                                max_new_tokens=args.max_tokens, cache_implementation="static")[:, prompt.shape[1]:]
        synchronize(args)
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[2:])  # The first ones compile.
    print(f"then: {tokens.numel()} tokens in {median:.2f} s ({tokens.numel() / median:.4g} tokens/s)")


def main():
    args = peer_flags.parse_llama(sys.argv[1:], __doc__)
    args.place = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(args.place)
    if args.threads > 0:
        torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    if args.max_tokens:
        generate(args)
        return
    rank, ranks = 0, 1
    if args.impl == "fsdp2":
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
    train(make_model(args), args, rank, ranks)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
