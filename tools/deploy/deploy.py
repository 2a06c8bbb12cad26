#!/usr/bin/env python3
"""Copies a program that Bazel has built, with the shared libraries it needs, into a folder that runs elsewhere.

  ./bazelw build --config=opt //examples/gpt:train
  tools/deploy/deploy.py bazel-bin/examples/gpt/train /srv/train
  scp -r /srv/train other-host: && ssh other-host train/train --data=text

The folder holds the program, which looks for libraries beside it first ($ORIGIN/lib), and `lib`. What belongs to the
system's C library is not copied: the other host needs one that is at least as new. Nor is data: name it by flags.
"""

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys

RUNPATH = b"$ORIGIN/lib"
# Parts of glibc have to fit each other and the loader; the kernel brings the first itself.
OF_THE_SYSTEM = re.compile(
    r"^(linux-vdso|ld-linux[^/]*|libc|libm|libmvec|libdl|librt|libpthread|libutil|libresolv|libnsl|libanl)\.so\b")
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_STRTAB, DT_RPATH, DT_RUNPATH = 0, 5, 15, 29


class Failure(Exception):
    """A text for the user."""


def run_path_places(image):
    """Offsets of the strings that say where an ELF file for 64 bits looks for libraries."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise Failure("it is no program for 64 bits, least significant byte first")
    table, = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    segments = []
    for i in range(count):
        kind, _, offset, address, _, bytes_in_file = struct.unpack_from("<IIQQQQ", image, table + i * size)
        segments.append((kind, offset, address, bytes_in_file))
    entries = []
    for kind, offset, _, length in segments:
        if kind == PT_DYNAMIC:
            entries = list(struct.iter_unpack("<qQ", image[offset:offset + length // 16 * 16]))
    entries = entries[:[tag for tag, _ in entries].index(DT_NULL)] if entries else []
    strings = next((value for tag, value in entries if tag == DT_STRTAB), None)
    for kind, offset, address, length in segments:
        if kind == PT_LOAD and strings is not None and address <= strings < address + length:
            start = offset + strings - address
            return [start + value for tag, value in entries if tag in (DT_RPATH, DT_RUNPATH)]
    return []


def set_run_path(path):
    """Makes the program look in RUNPATH alone, in the place of what it has: no tool but this is needed."""
    with open(path, "r+b") as file:
        image = file.read()
        places = run_path_places(image)
        if not places:
            raise Failure(f"{path} names no folder to look for libraries in; is it a program that Bazel has linked?")
        for place in places:
            room = image.index(b"\0", place) - place
            if room < len(RUNPATH):
                raise Failure(f"{path}: no room for {RUNPATH.decode()}; link it with -Wl,-rpath,$ORIGIN/lib")
            file.seek(place)
            file.write(RUNPATH.ljust(room, b"\0"))


def libraries(program, **variables):
    """Name -> path of all shared libraries that it loads; None where one is not found."""
    listed = subprocess.run(["ldd", program], env={"PATH": os.defpath, "LC_ALL": "C", **variables},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, check=False)
    if listed.returncode != 0:
        raise Failure(f"ldd {program}: {(listed.stderr or listed.stdout).strip()}")
    found = {}
    for line in listed.stdout.splitlines():
        match = re.match(r"\s*(\S+) => (not found|\S+)", line)
        if match:
            found[match.group(1)] = None if match.group(2) == "not found" else match.group(2)
    return found


def check(program, folder):
    """Everything is found, in the folder or in the system."""
    for name, path in libraries(program).items():
        if path is None:
            raise Failure(f"{name} was not found where {program} would look for it")
        if not OF_THE_SYSTEM.match(name) and not os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep):
            raise Failure(f"{name} would still come from {path}: a library names that place itself")


def deploy(program, folder):
    """Returns the copied program's path."""
    if os.path.exists(folder) and os.listdir(folder):
        raise Failure(f"{folder} is there and not empty; name a new folder")
    # Where the loader looks depends on where the program really is.
    found = libraries(os.path.realpath(program), LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""))
    missing = sorted(name for name, path in found.items() if path is None)
    if missing:
        raise Failure(f"{program} does not run here: no {', '.join(missing)}")
    os.makedirs(os.path.join(folder, "lib"), exist_ok=True)
    copy = os.path.join(folder, os.path.basename(program))
    shutil.copyfile(program, copy)
    os.chmod(copy, 0o755)
    for name, path in found.items():
        if not OF_THE_SYSTEM.match(name):
            shutil.copyfile(path, os.path.join(folder, "lib", name))
    set_run_path(copy)
    check(copy, folder)
    return copy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="such as bazel-bin/examples/gpt/train")
    parser.add_argument("folder", help="a new one")
    arguments = parser.parse_args()
    try:
        print(deploy(arguments.program, arguments.folder))
    except (Failure, OSError) as failure:
        print(f"deploy: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
