#!/usr/bin/env python3
"""Packs the folder that CMake and pkg-config use: //package:install calls it with the files.

Of the headers it takes the public ones and those that they include, directly or not. The same files give the same bytes.
With programs it makes a wheel of the folder, which pip puts beside its torch.
"""

import argparse
import base64
import gzip
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import tarfile
import zipfile

# Where templates go; @VERSION@ and others are replaced in all.
PLACES = {".cmake": "lib/cmake/libtorch_fsdp", ".pc": "lib/pkgconfig"}
LICENSES = "share/licenses/libtorch_fsdp"
# Systems with glibc 2.KEY have the versions of symbols up to GLIBCXX_3.4.FIRST and CXXABI_1.3.SECOND (auditwheel's).
SYSTEMS = {28: (24, 11), 31: (28, 12), 34: (29, 13), 35: (30, 13), 39: (33, 15)}
# On PATH, for each program. Its place is known here alone: site-packages are in folders of Python's versions.
SCRIPT = b"""#!/bin/sh
self=$(readlink -f "$0")
found=
for packages in "${self%/*}"/../lib*/python3*/*-packages "${self%/*}/.."; do
  program=$packages/libtorch_fsdp/bin/${self##*/}
  [ -x "$program" ] || continue
  [ ! -d "$packages/torch/lib" ] || exec "$program" "$@"
  found=$program
done
echo "$0: there is no torch beside ${found%/bin/*}: with the folder of one that is elsewhere, run" \
  "LD_LIBRARY_PATH=.../torch/lib $found" >&2
exit 127
"""
METADATA = """Metadata-Version: 2.4
Name: libtorch_fsdp
Version: {version}
Summary: Fully Sharded Data Parallel for LibTorch: headers, library and CMake files, fsdp-train and fsdp-generate
License-Expression: {license}
{license_files}Requires-Dist: torch ~= {torch}.0
"""


def read(path):
    with open(path, "rb") as file:
        return file.read()


INCLUDE = re.compile(r'^(\s*#\s*include\s+")([^"]+)(")', re.M)


def with_included(public, headers):
    """{place: contents} of the headers at `public` places and of all that they include out of `headers`, {place: path}.

    They include each other by relative paths, and the names of our guards begin with the library's, so that headers of a
    program, whose folder may be searched first, can have the same paths: base/status_macros.h.
    """
    found, queue = {}, list(public)
    while queue:
        place = queue.pop()
        if place in found or place not in headers:
            continue
        text = read(headers[place]).decode()
        included = [path for _, path, _ in INCLUDE.findall(text) if path in headers]
        queue += included
        folder = os.path.dirname(place)
        text = INCLUDE.sub(lambda match: f'{match[1]}{os.path.relpath(match[2], folder)}{match[3]}'
                           if match[2] in headers else match[0], text)
        if not place.startswith("absl/"):
            text = re.sub(r"^(#ifndef |#define |#endif  // )([A-Z0-9_]+_H_)$", r"\1LIBTORCH_FSDP_\2", text, flags=re.M)
        found[place] = text.encode()
    return found


def mode_of(path):
    return 0o755 if re.search(r"\.so|/bin/|/scripts/", path) else 0o644


def pack(output, files, links):
    """A tar.gz of {path: contents} and {path: target}, without times and owners."""
    with open(output, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as zipped, \
            tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in sorted([*files, *links]):
            info = tarfile.TarInfo(path)
            info.mode = mode_of(path)
            if path in links:
                info.type, info.linkname = tarfile.SYMTYPE, links[path]
                tar.addfile(info)
            else:
                info.size = len(files[path])
                tar.addfile(info, io.BytesIO(files[path]))


def system_of(symbols):
    """The tag of the systems that have all of the needed `symbols`, as readelf -V prints them."""
    def newest(start, of):
        return max((int(number) for number in re.findall(rf"Name: {start}[.](\d+)", of)), default=0)
    needed = newest("GLIBCXX_3[.]4", symbols), newest("CXXABI_1[.]3", symbols)
    of_libstdcxx = [glibc for glibc, had in SYSTEMS.items() if had[0] >= needed[0] and had[1] >= needed[1]]
    if not of_libstdcxx:
        sys.exit(f"lay_out.py: no row of SYSTEMS has GLIBCXX_3.4.{needed[0]} and CXXABI_1.3.{needed[1]}: add one")
    glibc = max(newest("GLIBC_2", symbols.replace("GLIBC_ABI_DT_RELR", "GLIBC_2.36")), min(of_libstdcxx))
    return f"py3-none-manylinux_2_{glibc}_{platform.machine()}"


def pack_wheel(folder, version, torch, library, programs, files):
    """A wheel of `files` and `programs`, {name: path}, in `folder`."""
    elf = subprocess.check_output(["readelf", "-dVW", library, *programs.values()], text=True)
    cuda = re.search(r"\[libcudart\.so\.(\d+)\]", elf)
    version, tag = version + (f"+cu{cuda[1]}" if cuda else ""), system_of(elf)
    name = f"libtorch_fsdp-{version}"
    info = f"{name}.dist-info"
    packed = {f"libtorch_fsdp/{path}".replace(f"libtorch_fsdp/{LICENSES}", f"{info}/licenses"): text
              for path, text in files.items()}
    # There are no links in wheels: a linker reads this.
    packed["libtorch_fsdp/lib/liblibtorch_fsdp.so"] = f"INPUT({os.path.basename(library)})\n".encode()
    for program, path in programs.items():
        packed[f"libtorch_fsdp/bin/{program}"] = read(path)
        packed[f"{name}.data/scripts/{program}"] = SCRIPT
    texts = sorted(path[len(f"{info}/licenses/"):] for path in packed if path.startswith(info))
    terms = re.findall(r"^[\w-]+: (.*)", files[f"{LICENSES}/SPDX"].decode(), re.M)
    packed[f"{info}/METADATA"] = METADATA.format(
        version=version, torch=torch, license=" AND ".join(sorted(set(" AND ".join(terms).split(" AND ")))),
        license_files="".join(f"License-File: {text}\n" for text in texts)).encode()
    packed[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: {name}\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = ""
    for path in sorted(packed):
        digest = base64.urlsafe_b64encode(hashlib.sha256(packed[path]).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(packed[path])}\n"
    packed[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    os.makedirs(folder, exist_ok=True)
    with zipfile.ZipFile(os.path.join(folder, f"{name}-{tag}.whl"), "w") as wheel:
        for path, text in packed.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100000 | mode_of(path)) << 16
            wheel.writestr(entry, text, zipfile.ZIP_DEFLATED)


def main():
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    for name in ("output", "library", "libtorch", "version", "cuda"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("public", "header", "template", "license", "program"):  # PLACE=PATH, but for two
        parser.add_argument(f"--{name}", action="append", default=[])
    args = parser.parse_args()
    public, headers, licenses = (dict(pair.split("=", 1) for pair in pairs)
                                 for pairs in (args.public, args.header, args.license))

    files = {f"include/{place}": text for place, text in with_included(public, headers).items()}
    library = os.path.basename(args.library)
    files[f"lib/{library}"] = read(args.library)
    torch = read(os.path.join(args.libtorch, "torch/headeronly/version.h")).decode()
    needs_20 = b"C++20" in read(os.path.join(args.libtorch, "ATen/ATen.h"))
    values = {"VERSION": args.version, "CUDA": args.cuda, "LIBRARY": library, "STANDARD": "20" if needs_20 else "17",
              "TORCH": ".".join(re.search(rf"define TORCH_VERSION_{part} (\d+)", torch)[1] for part in ("MAJOR", "MINOR"))}
    for path in args.template:
        name = os.path.basename(path)
        text = re.sub("@([A-Z]+)@", lambda match: values[match[1]], read(path).decode())
        files[f"{PLACES[os.path.splitext(name)[1]]}/{name}"] = text.encode()
    names = [name.split(" ", 1) for name in sorted(licenses)]
    files[f"{LICENSES}/SPDX"] = "".join(f"{name}: {expression}\n" for name, expression in names).encode()
    for (name, _), path in zip(names, (licenses[name] for name in sorted(licenses))):
        files[f"{LICENSES}/{name}"] = read(path)
    if args.program:
        programs = {os.path.basename(path): path for path in sorted(args.program)}
        pack_wheel(args.output, args.version, values["TORCH"], args.library, programs, files)
    else:
        pack(args.output, files, {"lib/liblibtorch_fsdp.so": library})


if __name__ == "__main__":
    main()
