#!/usr/bin/env python3
"""Checks that Python's PEFT reads the adapters that //adapters:lora_test has left in FOLDER, and merges them to the bits
of the models that it has exported.

usage: check_with_python.py FOLDER

Needs torch, peft and safetensors. Prints a line for each check; exits with 1 if one failed.
"""
import pathlib
import sys

import peft
import record_peft
import safetensors.torch

RECORDED = pathlib.Path(__file__).parent / "recorded"


def merged_by_python(name, adapter):
    net = record_peft.Net()
    net.load_state_dict(safetensors.torch.load_file(RECORDED / name / "base.safetensors"))
    return peft.PeftModel.from_pretrained(net, adapter).merge_and_unload().state_dict()


def check(name, ranks, folder):
    theirs = merged_by_python(name, folder / "adapter")
    ours = safetensors.torch.load_file(folder / "merged" / "model.safetensors")
    equal = ours.keys() == theirs.keys() and all(ours[key].equal(value) for key, value in theirs.items())
    print(f"{name}, {ranks} ranks: {'the same bits' if equal else 'DIFFERS'}")
    return equal


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    results = [check(name, ranks, pathlib.Path(sys.argv[1]) / f"peft_{name}{ranks}")
               for name in record_peft.CONFIGS for ranks in (1, 2, 3)]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if all(results) else 1)
