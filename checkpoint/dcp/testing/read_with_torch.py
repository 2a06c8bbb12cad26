#!/usr/bin/env python3
"""Reads what writer_test writes, by torch.distributed.checkpoint.

usage: FSDP_DCP_SAMPLE=FOLDER writer_test; read_with_torch.py FOLDER
"""

import os
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SHAPES = [("model", "w", torch.float32, (5, 7, 3)), ("model", "bf16", torch.bfloat16, (11,)),
          ("model", "empty", torch.int64, (0, 3)), ("model", "f8", torch.float8_e4m3fn, (3, 5)),
          ("w", "step", torch.float32, ()), ("w", "exp_avg", torch.float32, (5, 7, 3))]


def expected(index):
    """The tensor that writer_test gives to a place in the list."""
    _, _, dtype, shape = SHAPES[index]
    count = torch.empty(shape, dtype=dtype).numel() * torch.empty((), dtype=dtype).element_size()
    data = torch.tensor([(index * 37 + i * 11) % 64 for i in range(count)], dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def check(state):
    """Exits with 1 where a value is another."""
    parts = {"model": state["model"], "w": state["optim"]["state"]["w"]}
    for index, (part, name, dtype, shape) in enumerate(SHAPES):
        tensor = parts[part][name]
        assert tensor.dtype == dtype and tuple(tensor.shape) == shape, (name, tensor.dtype, tensor.shape)
        want = expected(index)
        if tensor.numel():
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name
    assert state["optim"]["param_groups"][0]["lr"] == 0.125
    assert state["optim"]["param_groups"][0]["params"] == ["w"]
    assert state["step"] == 7


def main():
    """By dcp.load() into tensors that are there, and by dcp_to_torch_save()."""
    folder = sys.argv[1]
    model = {name: torch.zeros(shape).to(dtype) for part, name, dtype, shape in SHAPES if part == "model"}
    optimizer = {name: torch.zeros(shape) for part, name, _, shape in SHAPES if part == "w"}
    state = {"model": model, "optim": {"state": {"w": optimizer}, "param_groups": [{"lr": 0.0, "params": [""]}]},
             "step": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    check(state)
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "all.pt")
        dcp_to_torch_save(folder, path)
        check(torch.load(path, weights_only=True))
    print("torch", torch.__version__, "reads", folder)


if __name__ == "__main__":
    main()
