#!/usr/bin/env python3
"""Fills a folder with `include` and `lib` of LibTorch: links to an installed one (LIBTORCH=DIR) or to the pinned wheels.

The wheels' files are kept unpacked under ${XDG_CACHE_HOME:-~/.cache}/libtorch_fsdp, so that a second clone costs nothing.
"""

import argparse
import fcntl
import glob
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

# PyTorch publishes its C++ library to package registries as part of the Python package. libtorch_cpu.so of that build
# names two small CUDA libraries; nothing of CUDA is called without a GPU.
WHEELS = {
    "torch==2.11.0": "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
    "nvidia-cuda-runtime==13.0.96": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    "nvidia-cuda-cupti==13.0.85": "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
}
# The wheels name different versions of the C library in their platform tags.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 25, 26, 27, 28)]

# What linking and running on the CPU takes; not libtorch.so, which pulls in CUDA's math libraries.
LIBRARIES = ["libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libcudart.so.13", "libcupti.so.13"]
REQUIRED = ["libtorch_cpu.so", "libc10.so"]


class Failure(Exception):
    """Says what was tried, why it did not work, and what to do."""


def cache_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "libtorch_fsdp")


def by_hand(downloads):
    lines = ["By hand, either", "  set LIBTORCH=DIR to an installed LibTorch (DIR/include, DIR/lib), or",
             f"  put these wheels into {downloads}:"]
    return "\n".join(lines + [f"    {name} (cp311, x86_64): sha256 {sha256}" for name, sha256 in WHEELS.items()])


def download(folder, downloads):
    """Returns the paths of the wheels, checked against their sha256: pip refuses any other file."""
    requirements = os.path.join(folder, "requirements.txt")
    with open(requirements, "w", encoding="utf-8") as file:
        for name, sha256 in WHEELS.items():
            file.write(f"{name} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
               "--require-hashes", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--python-version=311",
               "--find-links", downloads, "--dest", folder, "--requirement", requirements]
    command += [f"--platform={name}" for name in PLATFORMS]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False)
    if done.returncode != 0:
        if "No module named pip" in done.stdout:
            raise Failure("python3 has no pip. On Debian:  apt-get install python3-pip\n" + by_hand(downloads))
        # Where packages come from is the machine's affair: no addresses in messages.
        said = [re.sub(r"\w+://\S+|host='[^']*'", "the registry", line) for line in done.stdout.splitlines()
                if line.startswith("ERROR:")]
        raise Failure(f"downloading {', '.join(WHEELS)} with pip failed:\n  " + "\n  ".join(said[-4:]) + "\n" +
                      by_hand(downloads))
    return glob.glob(os.path.join(folder, "*.whl"))


def unpack(wheel, tree):
    """Takes the headers, the libraries of LIBRARIES and the licences out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            base = os.path.basename(name)
            if name.startswith("torch/include/"):
                target = os.path.join(tree, name[len("torch/"):])
            elif base in LIBRARIES:
                target = os.path.join(tree, "lib", base)
            elif ".dist-info/licenses/" in name:
                target = os.path.join(tree, "licenses", name.replace(".dist-info/licenses", ""))
            else:
                continue
            if name.endswith("/"):
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with archive.open(name) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            if ".so" in base:
                os.chmod(target, 0o755)


def pinned_tree():
    """The unpacked wheels; downloads them the first time."""
    cache = cache_folder()
    key = hashlib.sha256(repr([sorted(WHEELS.items()), LIBRARIES]).encode()).hexdigest()[:16]
    tree = os.path.join(cache, "libtorch-" + key)
    if os.path.isdir(tree):
        return tree
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise Failure(f"there is no pinned LibTorch for {sys.platform} {platform.machine()}: "
                      "set LIBTORCH=DIR to an installed one (DIR/include, DIR/lib)")
    downloads = os.path.join(cache, "downloads")
    os.makedirs(downloads, exist_ok=True)
    # Two builds may come here at once: one downloads, the other waits and finds the tree.
    with open(os.path.join(cache, "lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(tree):
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                new = os.path.join(folder, "tree")
                for wheel in download(folder, downloads):
                    unpack(wheel, new)
                missing = [name for name in LIBRARIES if not os.path.exists(os.path.join(new, "lib", name))]
                if missing:
                    raise Failure("the wheels lack " + ", ".join(missing))
                os.rename(new, tree)
    return tree


def installed_libraries(folder):
    """Library name -> path, for an installed LibTorch: a wheel keeps CUDA's libraries in folders beside its own."""
    places = [os.path.join(folder, "lib"), *sorted(glob.glob(os.path.join(folder, "..", "nvidia", "*", "lib")))]
    found = {}
    for pattern in ("libtorch_cpu.so", "libc10.so", "libgomp*.so*", "libcudart*.so*", "libcupti*.so*"):
        for place in places:
            for path in sorted(glob.glob(os.path.join(place, pattern))):
                found.setdefault(os.path.basename(path), os.path.realpath(path))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    installed = os.environ.get("LIBTORCH")
    try:
        tree = os.path.abspath(installed) if installed else pinned_tree()
        libraries = installed_libraries(tree)
        missing = [os.path.join(tree, "lib", name) for name in REQUIRED if name not in libraries]
        if not os.path.exists(os.path.join(tree, "include", "ATen", "core", "Tensor.h")):
            missing.append(os.path.join(tree, "include", "ATen", "core", "Tensor.h"))
        if missing:
            raise Failure(f"{'LIBTORCH=' + installed if installed else tree} is not a LibTorch: no {', '.join(missing)}")
        os.makedirs(os.path.join(args.output, "lib"), exist_ok=True)
        os.symlink(os.path.join(tree, "include"), os.path.join(args.output, "include"))
        for name, path in libraries.items():
            os.symlink(path, os.path.join(args.output, "lib", name))
    except (Failure, OSError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
