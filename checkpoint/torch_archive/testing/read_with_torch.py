#!/usr/bin/env python3
"""Reads what archive_layout_test writes, by torch and by zipfile.

usage: FSDP_TORCH_ARCHIVE_SAMPLE=FILE archive_layout_test; read_with_torch.py FILE
"""

import sys
import zipfile

import torch


def main():
    """Exits with 1 where a value is another."""
    path = sys.argv[1]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, archive.testzip()
    for use_mmap in (False, True):
        value = torch.load(path, weights_only=True, mmap=use_mmap)
        assert value["w"].dtype == torch.float32 and value["w"].shape == (3, 5)
        assert value["w"].view(torch.uint8).flatten().tolist() == list(range(60))
        assert value["scalar"].dtype == torch.bfloat16 and value["scalar"].shape == ()
        assert value["empty"].dtype == torch.int64 and value["empty"].shape == (7, 0)
        assert value["f8"].dtype == torch.float8_e4m3fn
        assert value["f8"].view(torch.uint8).tolist() == list(range(48, 59))
        assert value["group"] == {"lr": 0.1, "step": 70000, "betas": (0.9, 0.95), "fused": False, "foreach": None,
                                  "params": ["w", "b"]}, value["group"]
        assert value[0] == "a key that is no text"
    print("torch", torch.__version__, "reads", path)


if __name__ == "__main__":
    main()
