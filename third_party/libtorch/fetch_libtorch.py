#!/usr/bin/env python3
"""Makes a folder with the CPU part of LibTorch and prints its path.

usage: fetch_libtorch.py CACHE_FOLDER

LibTorch comes as Python wheels, pinned by sha256. They are fetched with pip,
unpacked selectively and kept under a name that holds the hashes, so that a
second checkout costs nothing. The folder appears atomically.
"""
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

WHEELS = {
    "torch==2.11.0": "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
    # libtorch_cpu.so links against these two even when no GPU is used.
    "nvidia-cuda-runtime==13.0.96": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    "nvidia-cuda-cupti==13.0.85": "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
}
LIBRARIES = {
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libc10.so",
    "torch/lib/libgomp.so.1",
    "nvidia/cu13/lib/libcudart.so.13",
    "nvidia/cu13/lib/libcupti.so.13",
}
INCLUDE = "torch/include/"
PLATFORMS = ["2_17", "2_24", "2_25", "2_26", "2_27", "2_28"]

HELP = """
LibTorch could not be fetched. By hand, one of:
 - fetch these wheels for CPython 3.11 on x86-64 Linux and put them into one
   folder, then build with PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1:
     {wheels}
 - unpack a LibTorch {version} and build with LIBTORCH=FOLDER (the one with
   include/ and lib/)."""


def download(folder):
    requirements = os.path.join(folder, "requirements.txt")
    with open(requirements, "w") as f:
        for wheel, sha256 in WHEELS.items():
            f.write(f"{wheel} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--require-hashes", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--python-version", "311", "--implementation", "cp", "--dest", folder]
    for platform in PLATFORMS:
        command += ["--platform", f"manylinux_{platform}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64", "-r", requirements]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        sys.exit(result.stdout + HELP.format(wheels="\n     ".join(WHEELS), version="2.11.0"))
    return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".whl")]


def unpack(wheel, target):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name in LIBRARIES:
                path = os.path.join(target, "lib", os.path.basename(name))
            elif name.startswith(INCLUDE) and not name.endswith("/"):
                path = os.path.join(target, "include", name[len(INCLUDE):])
            else:
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with archive.open(name) as source, open(path, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)


def main():
    cache = sys.argv[1]
    key = hashlib.sha256(repr((sorted(WHEELS.items()), sorted(LIBRARIES))).encode()).hexdigest()
    target = os.path.join(cache, "libtorch-" + key[:16])
    if not os.path.isdir(target):
        os.makedirs(cache, exist_ok=True)
        # On the cache's own file system, so that the rename below is atomic.
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            tree = os.path.join(temporary, "tree")
            os.makedirs(tree)
            for wheel in download(temporary):
                unpack(wheel, tree)
            os.chmod(tree, 0o755)
            try:
                os.rename(tree, target)
            except OSError:
                if not os.path.isdir(target):  # else another build was faster
                    raise
    print(target)


if __name__ == "__main__":
    main()
