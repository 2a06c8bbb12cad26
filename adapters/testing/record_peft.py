#!/usr/bin/env python3
"""Records what Python's PEFT makes of a small model: the oracle of //adapters:lora_test.

usage: record_peft.py FOLDER

Needs torch, peft and safetensors. For each of two configurations FOLDER gets base.safetensors, batches.safetensors (x and
y of each step), losses.json, the adapter before and after ten steps of AdamW, and merged.safetensors.
"""
import json
import pathlib
import sys

import peft
import safetensors.torch
import torch

STEPS, ROWS, DIM, WIDE, CLASSES = 10, 6, 16, 24, 5


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = torch.nn.Linear(DIM, WIDE, bias=False)
        self.v_proj = torch.nn.Linear(DIM, WIDE)
        self.o_proj = torch.nn.Linear(WIDE, DIM)

    def forward(self, x):
        return x + self.o_proj(torch.tanh(self.q_proj(x)) * self.v_proj(x))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(DIM, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


CONFIGS = {
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["head"]},
    "rslora": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "layers.1.v_proj", "o_proj"], "use_rslora": True},
}


def save(path, tensors):
    safetensors.torch.save_file({name: value.detach().contiguous() for name, value in tensors.items()}, path)


def record(folder, name, options):
    torch.manual_seed(sum(name.encode()))
    folder.mkdir(parents=True)
    net = Net()
    save(folder / "base.safetensors", net.state_dict())
    model = peft.get_peft_model(net, peft.LoraConfig(**options))
    model.save_pretrained(folder / "before")
    x, y = torch.randn(STEPS, ROWS, DIM), torch.randint(CLASSES, (STEPS, ROWS))
    save(folder / "batches.safetensors", {"x": x, "y": y})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(x[step]), y[step])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (folder / "losses.json").write_text(json.dumps(losses) + "\n")
    model.save_pretrained(folder / "after")
    save(folder / "merged.safetensors", model.merge_and_unload().state_dict())
    for readme in folder.glob("*/README.md"):
        readme.unlink()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    for one, its in CONFIGS.items():
        record(pathlib.Path(sys.argv[1]) / one, one, its)
