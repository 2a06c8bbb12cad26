#!/usr/bin/env python3
"""Fills a folder with `include` and `lib` of LibTorch: links to an installed one (LIBTORCH=DIR) or to the pinned wheels.

With --cuda: with `lib` of what LibTorch has for CUDA besides.
"""

import argparse
import glob
import os
import re
import sys

from wheels import Failure, PinnedTree, link_all, run

LAYOUT = "DIR/include, DIR/lib"
OLDEST = (2, 11)
TORCH = {"torch==2.11.0": "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a"}

# libtorch_cpu.so of that build names two small CUDA libraries; nothing of CUDA is called without a GPU.
WHEELS = {
    **TORCH,
    "nvidia-cuda-runtime==13.0.96": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    "nvidia-cuda-cupti==13.0.85": "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
}
# What linking and running on the CPU takes; not libtorch.so, which pulls in CUDA's math libraries.
LIBRARIES = ["libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libcudart.so.13", "libcupti.so.13"]
REQUIRED = ["libtorch_cpu.so", "libc10.so"]
PATTERNS = ["libtorch_cpu.so", "libc10.so", "libgomp*.so*", "libcudart*.so*", "libcupti*.so*"]

# What linking for CUDA takes on top. Running takes CUDA's libraries as well, which are where a GPU is.
CUDA_LIBRARIES = ["libtorch_cuda.so", "libc10_cuda.so"]


def in_tree(libraries, name):
    base = os.path.basename(name)
    return os.path.join("lib", base) if base in libraries else None


def in_cpu_tree(name):
    return name[len("torch/"):] if name.startswith("torch/include/") else in_tree(LIBRARIES, name)


def pinned_cpu():
    return PinnedTree("libtorch", WHEELS, in_cpu_tree, [f"lib/{name}" for name in LIBRARIES], LIBRARIES, "LIBTORCH",
                      LAYOUT).path()


def pinned_cuda():
    return PinnedTree("libtorch_cuda", TORCH, lambda name: in_tree(CUDA_LIBRARIES, name),
                      [f"lib/{name}" for name in CUDA_LIBRARIES], CUDA_LIBRARIES, "LIBTORCH", LAYOUT).path()


def installed_libraries(folder, patterns):
    """Library name -> path, for an installed LibTorch: a wheel keeps CUDA's libraries in folders beside its own."""
    places = [os.path.join(folder, "lib"), *sorted(glob.glob(os.path.join(folder, "..", "nvidia", "*", "lib")))]
    found = {}
    for pattern in patterns:
        for place in places:
            for path in sorted(glob.glob(os.path.join(place, pattern))):
                found.setdefault(os.path.basename(path), os.path.realpath(path))
    return found


def check(tree, installed, missing):
    if missing:
        raise Failure(f"{'LIBTORCH=' + installed if installed else tree} is not a LibTorch: no {', '.join(missing)}")


def check_release(tree):
    """Refuses releases that lack what our sources call: they would fail in the middle of the build."""
    text = ""
    for header in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        path = os.path.join(tree, "include", header)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                text += file.read()
    release = tuple(int(number) for number in re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", text))
    if release and release < OLDEST:
        raise Failure(f"LIBTORCH={tree} is LibTorch {'.'.join(map(str, release))}, and this library needs "
                      f"{'.'.join(map(str, OLDEST))} or later: name a later one, or none to have one fetched")


def fill_for_cpu(output, installed):
    tree = os.path.abspath(installed) if installed else pinned_cpu()
    libraries = installed_libraries(tree, PATTERNS)
    missing = [os.path.join(tree, "lib", name) for name in REQUIRED if name not in libraries]
    if not os.path.exists(os.path.join(tree, "include", "ATen", "core", "Tensor.h")):
        missing.append(os.path.join(tree, "include", "ATen", "core", "Tensor.h"))
    check(tree, installed, missing)
    check_release(tree)
    link_all(output, {"include": os.path.join(tree, "include"),
                      **{f"lib/{name}": path for name, path in libraries.items()}})


def fill_for_cuda(output, installed):
    tree = os.path.abspath(installed) if installed else pinned_cuda()
    libraries = installed_libraries(tree, CUDA_LIBRARIES)
    missing = [os.path.join(tree, "lib", name) for name in CUDA_LIBRARIES if name not in libraries]
    if missing and installed:
        raise Failure(f"LIBTORCH={installed} is a LibTorch without CUDA: no {', '.join(missing)}. "
                      "Build without --config=cuda, or name a LibTorch built for CUDA")
    if installed and not installed_libraries(tree, ["libcudart*.so*"]):
        raise Failure(f"LIBTORCH={installed}: no libcudart.so in {os.path.join(tree, 'lib')}, nor in a folder nvidia "
                      "beside it. Put a link to the one that it was built with there")
    link_all(output, {f"lib/{name}": path for name, path in libraries.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    (fill_for_cuda if args.cuda else fill_for_cpu)(args.output, os.environ.get("LIBTORCH"))


if __name__ == "__main__":
    sys.exit(run(main))
