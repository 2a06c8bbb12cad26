#!/usr/bin/env python3
"""Makes the files of `data`: what torch.save() writes. Needs torch.

usage: make_samples.py [FOLDER]
"""

import collections
import os
import sys
import zipfile

import torch


def values():
    """What is saved, by file name."""
    torch.manual_seed(1)
    base = torch.arange(24, dtype=torch.float32)
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    return {
        "mixed.pt": {
            "a": torch.arange(3.0), "list": [1, 2.5, "x", None, True, (1, -2)], "bf16": torch.tensor(1, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3), "i64": torch.tensor([1 << 40, -1]), "bool": torch.tensor([True, False, True]),
            "ordered": collections.OrderedDict(t=torch.tensor([[1.0, 2], [3, 4]]).t()), "size": torch.Size([2, 3]),
            "f8": torch.zeros(2, dtype=torch.float8_e4m3fn), "u16": torch.zeros(3, dtype=torch.uint16),
            "f64": torch.tensor(0.5, dtype=torch.float64), 7: {"nested": []}, "big": 1 << 40},
        "shared.pt": {"whole": base, "part": base[4:12].view(2, 4), "column": base.view(6, 4)[:, 1]},
        "module.pt": module.state_dict(),
        "parameter.pt": torch.nn.Parameter(torch.ones(2)),
        "number.pt": 0.25,
        "archive.pt": torch.arange(6, dtype=torch.int32).reshape(2, 3),
    }


def main():
    """Writes one file for each value, and some that must be refused."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "data")
    os.makedirs(folder, exist_ok=True)
    for name, value in values().items():
        torch.save(value, os.path.join(folder, name))
    torch.save(torch.device("cpu"), os.path.join(folder, "refused_device.pt"))
    torch.save({"z": torch.tensor([1 + 2j], dtype=torch.complex128)}, os.path.join(folder, "refused_complex128.pt"))
    torch.save({"w": torch.ones(2)}, os.path.join(folder, "refused_legacy.pt"), _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), os.path.join(folder, "refused_script.pt"))
    with zipfile.ZipFile(os.path.join(folder, "archive.pt")) as source, zipfile.ZipFile(
            os.path.join(folder, "refused_deflated.pt"), "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))


if __name__ == "__main__":
    main()
