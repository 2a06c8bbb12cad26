#!/usr/bin/env python3
"""Fills a folder with links to the CUDA toolkit, or to NCCL: installed ones, or the pinned wheels.

toolkit: CUDA_HOME, else /usr/local/cuda, else wheels      -> bin, include, nvvm
nccl:    NCCL_HOME, else the toolkit's folder, else /usr, else a wheel      -> include/nccl.h, lib/libnccl.so.2
"""

import argparse
import os
import sys

from wheels import Failure, PinnedTree, link_all, run

USUAL_TOOLKIT = "/usr/local/cuda"
TOOLKIT_LAYOUT = "DIR/bin/nvcc, DIR/include, DIR/nvvm"
NCCL_LAYOUT = "DIR/include/nccl.h, DIR/lib/libnccl.so.2"
LIBRARY_FOLDERS = ["lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"]

# As LibTorch's: CUDA 13.0.
TOOLKIT = {
    "nvidia-cuda-nvcc==13.0.88": {"x86_64": "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
                                  "aarch64": "c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f"},
    "nvidia-nvvm==13.0.88": {"x86_64": "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
                             "aarch64": "c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1"},
    "nvidia-cuda-crt==13.0.88": {"x86_64": "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
                                 "aarch64": "ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003"},
    "nvidia-cuda-cccl==13.0.85": {"x86_64": "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
                                  "aarch64": "6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c"},
    "nvidia-cuda-runtime==13.0.96": {"x86_64": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
                                     "aarch64": "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55"},
}
NCCL = {
    "nvidia-nccl-cu13==2.28.9": {"x86_64": "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
                                 "aarch64": "01c873ba1626b54caa12272ed228dc5b2781545e0ae8ba3f432a8ef1c6d78643"},
}


def lacking(folder, files):
    """What of `files` is not below `folder`."""
    return [os.path.join(folder, name) for name in files if not os.path.exists(os.path.join(folder, name))]


def toolkit_lacks(folder):
    return lacking(folder, ["bin/nvcc", "nvvm", "include/cuda_runtime_api.h"])


def nccl_library(folder):
    """The path of libnccl.so.2 in one of the usual places below `folder`."""
    paths = [os.path.join(folder, place, "libnccl.so.2") for place in LIBRARY_FOLDERS]
    return next((path for path in paths if os.path.exists(path)), None)


def nccl_lacks(folder):
    missing = [] if nccl_library(folder) else [os.path.join(folder, "lib", "libnccl.so.2")]
    return lacking(folder, ["include/nccl.h"]) + missing


def in_toolkit(name):
    for start in ("nvidia/cu13/bin/", "nvidia/cu13/nvvm/", "nvidia/cu13/include/"):
        if name.startswith(start):
            return name[len("nvidia/cu13/"):]
    return None


def in_nccl(name):
    for start in ("nvidia/nccl/include/nccl.h", "nvidia/nccl/lib/libnccl.so.2"):
        if name == start:
            return name[len("nvidia/nccl/"):]
    return None


def installed(variable, usual, lacks, layout):
    """The folder that the environment variable names, or the first of `usual` that has everything; else None."""
    named = os.environ.get(variable)
    if named:
        missing = lacks(named)
        if missing:
            raise Failure(f"{variable}={named} does not have {', '.join(missing)}. Set it to a folder with {layout}, or "
                          "unset it")
        return os.path.abspath(named)
    return next((folder for folder in usual if folder and not lacks(folder)), None)


def toolkit_folder(usual):
    return installed("CUDA_HOME", usual, toolkit_lacks, TOOLKIT_LAYOUT)


def fill_with_toolkit(output, usual):
    folder = toolkit_folder(usual) or PinnedTree(
        "cuda", TOOLKIT, in_toolkit, ["bin/nvcc", "nvvm/bin/cicc", "include/cuda_runtime_api.h", "include/crt"], "",
        "CUDA_HOME", TOOLKIT_LAYOUT).path()
    link_all(output, {name: os.path.join(folder, name) for name in ("bin", "include", "nvvm")})


def fill_with_nccl(output, usual):
    toolkit = None if "NCCL_HOME" in os.environ else toolkit_folder(usual)
    folder = installed("NCCL_HOME", [toolkit, "/usr"], nccl_lacks, NCCL_LAYOUT) or PinnedTree(
        "nccl", NCCL, in_nccl, ["include/nccl.h", "lib/libnccl.so.2"], "", "NCCL_HOME", NCCL_LAYOUT).path()
    link_all(output, {"include/nccl.h": os.path.join(folder, "include/nccl.h"),
                      "lib/libnccl.so.2": os.path.realpath(nccl_library(folder))})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--usual", action="append", help="where to look for a toolkit instead of the usual place")
    parser.add_argument("what", choices=["toolkit", "nccl"])
    args = parser.parse_args()
    fill = fill_with_toolkit if args.what == "toolkit" else fill_with_nccl
    fill(args.output, args.usual or [USUAL_TOOLKIT])


if __name__ == "__main__":
    sys.exit(run(main))
