#!/usr/bin/env python3
"""Fills a folder with `include` and `lib` of LibTorch: links to an installed one (LIBTORCH=DIR) or to the pinned wheels.

With --cuda: with `lib` of what LibTorch has for CUDA besides.
"""

import argparse
import glob
import os
import platform
import re
import sys

from wheels import Failure, PinnedTree, link_all, run

LAYOUT = "DIR/include, DIR/lib"
OLDEST = (2, 11)
TORCH = {
    "torch==2.11.0": {"x86_64": "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
                      "aarch64": "d91aac77f24082809d2c5a93f52a5f085032740a1ebc9252a7b052ef5a4fddc6"},
}

# libtorch_cpu.so of that build names two small CUDA libraries; nothing of CUDA is called without a GPU.
WHEELS = {
    **TORCH,
    "nvidia-cuda-runtime==13.0.96": {"x86_64": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
                                     "aarch64": "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55"},
    "nvidia-cuda-cupti==13.0.85": {"x86_64": "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
                                   "aarch64": "796bd679890ee55fb14a94629b698b6db54bcfd833d391d5e94017dd9d7d3151"},
}
# What linking and running on the CPU takes; not libtorch.so, which pulls in CUDA's math libraries.
LIBRARIES = ["libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libcudart.so.13", "libcupti.so.13"]
# On ARM, which MKL is not for, the wheel has BLAS, LAPACK and kernels for oneDNN beside them.
OF_ARM = ["libarm_compute.so", "libarm_compute_graph.so", "libnvpl_blas_core.so.0", "libnvpl_blas_lp64_gomp.so.0",
          "libnvpl_lapack_core.so.0", "libnvpl_lapack_lp64_gomp.so.0"]
REQUIRED = ["libtorch_cpu.so", "libc10.so"]
PATTERNS = ["libtorch_cpu.so", "libc10.so", "libgomp*.so*", "libcudart*.so*", "libcupti*.so*", "libarm_compute*.so*",
            "libnvpl*.so*", "libopenblas*.so*", "libgfortran*.so*"]

# What linking for CUDA takes on top. Running takes CUDA's libraries as well, which are where a GPU is.
CUDA_LIBRARIES = ["libtorch_cuda.so", "libc10_cuda.so"]


def in_tree(libraries, name):
    base = os.path.basename(name)
    return os.path.join("lib", base) if base in libraries else None


def in_cpu_tree(libraries, name):
    return name[len("torch/"):] if name.startswith("torch/include/") else in_tree(libraries, name)


def pinned_cpu(machine):
    libraries = LIBRARIES + OF_ARM if machine == "aarch64" else LIBRARIES
    return PinnedTree("libtorch", WHEELS, lambda name: in_cpu_tree(libraries, name),
                      [f"lib/{name}" for name in libraries], libraries, "LIBTORCH", LAYOUT, machine).path()


def pinned_cuda(machine):
    return PinnedTree("libtorch_cuda", TORCH, lambda name: in_tree(CUDA_LIBRARIES, name),
                      [f"lib/{name}" for name in CUDA_LIBRARIES], CUDA_LIBRARIES, "LIBTORCH", LAYOUT, machine).path()


def installed_libraries(folder, patterns):
    """Library name -> path, for an installed LibTorch: a wheel keeps others' libraries in folders beside its own."""
    places = [os.path.join(folder, "lib"), os.path.join(folder, "..", "torch.libs"),
              *sorted(glob.glob(os.path.join(folder, "..", "nvidia", "*", "lib")))]
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


def fill_for_cpu(output, installed, machine):
    tree = os.path.abspath(installed) if installed else pinned_cpu(machine)
    libraries = installed_libraries(tree, PATTERNS)
    missing = [os.path.join(tree, "lib", name) for name in REQUIRED if name not in libraries]
    if not os.path.exists(os.path.join(tree, "include", "ATen", "core", "Tensor.h")):
        missing.append(os.path.join(tree, "include", "ATen", "core", "Tensor.h"))
    check(tree, installed, missing)
    check_release(tree)
    link_all(output, {"include": os.path.join(tree, "include"),
                      **{f"lib/{name}": path for name, path in libraries.items()}})


def fill_for_cuda(output, installed, machine):
    tree = os.path.abspath(installed) if installed else pinned_cuda(machine)
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
    parser.add_argument("--machine", default=platform.machine(), help="the kind of processor of the pinned wheels")
    args = parser.parse_args()
    (fill_for_cuda if args.cuda else fill_for_cpu)(args.output, os.environ.get("LIBTORCH"), args.machine)


if __name__ == "__main__":
    sys.exit(run(main))
