#!/usr/bin/env python3
"""Packs the folder that CMake and pkg-config use: //package:install calls it with the files.

Of the headers it takes the public ones and those that they include, directly or not. The same files give the same bytes.
"""

import argparse
import gzip
import io
import os
import re
import tarfile

# Where templates go; @VERSION@ and others are replaced in all.
PLACES = {".cmake": "lib/cmake/libtorch_fsdp", ".pc": "lib/pkgconfig"}
LICENSES = "share/licenses/libtorch_fsdp"


def read(path):
    with open(path, "rb") as file:
        return file.read()


def with_included(public, headers):
    """{place: contents} of the headers at `public` places and of all that they include out of `headers`, {place: path}."""
    found, queue = {}, list(public)
    while queue:
        place = queue.pop()
        if place in found or place not in headers:
            continue
        found[place] = read(headers[place])
        queue += re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', found[place].decode(), re.M)
    return found


def pack(output, files, links):
    """A tar.gz of {path: contents} and {path: target}, without times and owners."""
    with open(output, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as zipped, \
            tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in sorted([*files, *links]):
            info = tarfile.TarInfo(path)
            info.mode = 0o755 if ".so" in path else 0o644
            if path in links:
                info.type, info.linkname = tarfile.SYMTYPE, links[path]
                tar.addfile(info)
            else:
                info.size = len(files[path])
                tar.addfile(info, io.BytesIO(files[path]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    for name in ("output", "library", "libtorch", "version", "cuda"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("public", "header", "template", "license"):  # PLACE=PATH, but for templates
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
    pack(args.output, files, {"lib/liblibtorch_fsdp.so": library})


if __name__ == "__main__":
    main()
