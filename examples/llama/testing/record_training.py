#!/usr/bin/env python3
"""Trains the tiny models of record_models.py with transformers, PyTorch and PEFT: the oracle of
//examples/llama/training:recorded_training_test.

usage: record_training.py [FOLDER]

Needs torch, transformers, peft and safetensors; `recorded` is of torch 2.11.0, transformers 5.24.0, peft 0.21.2.
FOLDER, `recorded` by default, has the models, and gets:

  batches.safetensors         "tokens" and "targets" [step, row, token]: what each step trains on, for all models
  NAME/trained.json           "losses" and "grad_norms", before they are clipped, of each step; the OPTIONS
  NAME/trained.safetensors    the weights after the last step
  lora/before, lora/after     an adapter of PEFT's on all linear layers of ADAPTED, and what it has become
  lora/trained.json           as above

Each is trained twice, by plain PyTorch in one process and by FSDP2 on two ranks; what is recorded is the former's, and
that the latter agrees is checked here.
"""
import math
import pathlib
import sys
import tempfile

import peft
import torch
import torch.distributed as dist
from record_models import MODELS, SIZES, write
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

STEPS, ROWS, TOKENS, RANKS = 10, 12, 16, 2
# Some models' gradients are always longer than is allowed, some never, some in a part of the steps.
OPTIONS = {"learning_rate": 2e-3, "warmup": 3, "floor": 0.1, "weight_decay": 0.1, "clip": 3.0}
LORA_OPTIONS = {**OPTIONS, "clip": 1.0}
ADAPTED, LORA = "llama_scaled_rope", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
NO_TARGET = -100


def make_batches():
    """Something that can be learned: most tokens follow from the one before. Rows have unequal numbers of targets."""
    vocab = SIZES["vocab_size"]
    tokens = torch.randint(vocab, (STEPS, ROWS, TOKENS + 1))
    for i in range(TOKENS):
        follows = torch.rand(STEPS, ROWS) < 0.8
        tokens[:, :, i + 1] = torch.where(follows, (5 * tokens[:, :, i] + 7) % vocab, tokens[:, :, i + 1])
    targets = tokens[:, :, 1:].clone()
    for row in range(ROWS):
        targets[:, row, TOKENS - row:] = NO_TARGET
    return {"tokens": tokens[:, :, :-1].contiguous(), "targets": targets}


def rate_at(step, options):
    """As WarmUpCosine of fsdp/optim/training_step.h."""
    peak, warmup, floor = options["learning_rate"], options["warmup"], options["floor"]
    if step < warmup:
        return peak * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))
    return peak * (floor + (1 - floor) * cosine)


def optimizer_of(trained, options):
    groups = [{"params": [one for one in trained if one.dim() >= 2], "weight_decay": options["weight_decay"]},
              {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95))


def train(model, batches, options, rank=0, ranks=1):
    """The losses and gradient norms, of all ranks together; each has its part of the rows."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(trained, options)
    mine = slice(ROWS // ranks * rank, ROWS // ranks * (rank + 1))
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batches["tokens"][step, mine], batches["targets"][step, mine]
        counted = (batches["targets"][step] != NO_TARGET).sum()
        loss = model(input_ids=tokens, labels=targets, shift_labels=targets, num_items_in_batch=counted).loss
        (loss * ranks).backward()  # FSDP2 takes the mean over ranks
        loss = loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(trained, options["clip"])
        if ranks > 1:
            dist.all_reduce(loss)
            norm = norm.full_tensor()
        losses.append(loss.item())
        norms.append(norm.item())
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, options)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "grad_norms": norms}


def load(folder, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True) if adapter else model


def weights_of(model):
    """Those that are trained; as a whole, also of a sharded model."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in values.items()}


def train_sharded(rank, scratch, load_arguments, *train_arguments):
    dist.init_process_group("gloo", init_method=f"file://{scratch}/ranks", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    model = load(*load_arguments)
    for layer in [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]:
        fully_shard(layer)
    fully_shard(model)
    figures = train(model, *train_arguments, rank, RANKS)
    weights = weights_of(model)
    if rank == 0:
        torch.save((figures, weights), f"{scratch}/sharded")
    dist.destroy_process_group()


def check_sharded(name, figures, weights, *arguments):
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(train_sharded, (scratch, *arguments), nprocs=RANKS)
        sharded, sharded_weights = torch.load(f"{scratch}/sharded")
    assert weights.keys() == sharded_weights.keys()
    off = {key: (torch.tensor(figures[key]) - torch.tensor(sharded[key])).abs().max() for key in figures}
    off_weights = {key: (weights[key] - value).abs().max() for key, value in sharded_weights.items()}
    # Adam divides a gradient by its own size: where it is nothing but rounding, so is the step. That is how it is with
    # the biases of keys, in the rotary dimensions that hardly turn.
    off["biases of keys"] = max([value for key, value in off_weights.items() if key.endswith("k_proj.bias")], default=0)
    off["other weights"] = max(value for key, value in off_weights.items() if not key.endswith("k_proj.bias"))
    print(f"{name}: FSDP2 on {RANKS} ranks differs by", ", ".join(f"{key} {value:.1e}" for key, value in off.items()))
    assert off["losses"] < 1e-5 and off["grad_norms"] < 5e-5
    assert off["other weights"] < 1e-5 and off["biases of keys"] < 1e-3


def record(name, folder, batches, options, load_arguments):
    model = load(*load_arguments)
    figures = train(model, batches, options)
    check_sharded(name, figures, weights_of(model), load_arguments, batches, options)
    write(folder / "trained.json", {**figures, **options})
    return model


def make_adapter(model, folder):
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(**LORA))
    save_adapter(model, folder)


def save_adapter(model, folder):
    """The same bytes each time, and nothing of this machine."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = ADAPTED
    config.target_modules = sorted(config.target_modules)
    model.save_pretrained(folder, save_embedding_layers=False)  # does not ask for ADAPTED where models are to be had
    (folder / "README.md").unlink()


def main():
    here = pathlib.Path(__file__).resolve().parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "recorded"
    torch.set_num_threads(1)
    torch.manual_seed(23)
    save_file(make_batches(), folder / "batches.safetensors")
    batches = load_file(folder / "batches.safetensors")
    for name in MODELS:
        model = record(name, folder / name, batches, OPTIONS, (folder / name,))
        save_file(weights_of(model), folder / name / "trained.safetensors")
    (folder / "lora").mkdir(exist_ok=True)
    make_adapter(folder / ADAPTED, folder / "lora/before")
    model = record("lora", folder / "lora", batches, LORA_OPTIONS, (folder / ADAPTED, folder / "lora/before"))
    save_adapter(model, folder / "lora/after")


if __name__ == "__main__":
    main()
