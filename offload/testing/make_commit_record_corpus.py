#!/usr/bin/env python3
"""Writes commit_record_corpus/: payloads of headers and records of kept file stores."""

import os
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = 4096


def header(capacity=16 * PAGE, block=4 * PAGE, regions=4, owner=b"rank 0"):
    return struct.pack("<QQqqqBq", 7, 8, capacity, block, regions, 1, len(owner)) + owner


def region(name, size, offset, blocks):
    body = struct.pack("<q", len(name)) + name + struct.pack("<qqq", size, offset, len(blocks))
    return body + b"".join(struct.pack("<IIB", *block) for block in blocks)


def record(regions, count=None, file_id=7):
    return struct.pack("<Qqq", file_id, 3, len(regions) if count is None else count) + b"".join(regions)


def corpus():
    two = [region(b"w", 100, 0, [(1, 2, 0)]), region(b"m", 20_000, PAGE, [(1, 5, 1), (9, 9, 0)])]
    huge = 2**63 - PAGE
    yield "sound", header(), record(two)
    yield "empty", header(), record([])
    yield "outside", header(), record([region(b"w", 100, 16 * PAGE, [(1, 2, 0)])])
    yield "more-regions-than-there-are", header(), record(two, count=2**62)
    yield "a-negative-number-of-regions", header(), record(two, count=-1)
    yield "of-another-file", header(), record(two, file_id=9)
    yield "a-long-name", header(), record([struct.pack("<q", 2**62) + b"w"])
    yield "a-huge-file", header(capacity=huge, regions=2**62), record([region(b"w", huge, 0, [(1, 2, 0)])])
    yield "huge-blocks", header(block=huge), record(two)


def main():
    folder = os.path.join(HERE, "commit_record_corpus")
    os.makedirs(folder, exist_ok=True)
    for name, head, body in corpus():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(bytes([len(head)]) + head + body)
    with open(os.path.join(folder, "as-it-is"), "wb") as file:
        file.write(b"\0" + struct.pack("<Q", 0x6665727061706402) + b"x" * 40)


if __name__ == "__main__":
    main()
