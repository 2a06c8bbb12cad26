#!/usr/bin/env python3
"""Writes corpus/: conversations of ranks and strangers with a job's store."""

import os
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
SET, COMPARE, GET, ADD, CHECK, WAIT, DELETE, COUNT = range(1, 9)
STRANGER, RANK = 0, 1


def frame(ask, texts=(), number=0):
    body = struct.pack("<BqI", ask, number, len(texts))
    for text in texts:
        body += struct.pack("<I", len(text)) + text
    return struct.pack("<I", len(body)) + body


def corpus():
    everything = (frame(SET, [b"a", b"1"]) + frame(GET, [b"a"]) + frame(ADD, [b"a"], 41) + frame(CHECK, [b"a", b"b"])
                  + frame(COMPARE, [b"b", b"", b"x"]) + frame(WAIT, [b"a", b"b"], 10) + frame(COUNT)
                  + frame(DELETE, [b"a"]) + frame(COUNT))
    yield "all", RANK | 254, everything
    yield "all-in-pieces", RANK | 6, everything
    yield "waits-that-end", RANK | 254, frame(WAIT, [b"no"], 5) + frame(GET, [b"no"], 7) + frame(COUNT)
    yield "waits-for-nothing", RANK | 64, frame(WAIT, [], 5) + frame(CHECK)
    yield "waits-for-ever", RANK | 64, frame(WAIT, [b"no"], 2**63 - 1) + frame(WAIT, [b"no"], -(2**63))
    yield "adds-too-much", RANK | 64, frame(ADD, [b"n"], 2**63 - 1) + frame(ADD, [b"n"], 1)
    yield "adds-to-a-text", RANK | 64, frame(SET, [b"n", b"text"]) + frame(ADD, [b"n"], 1)
    yield "too-few-texts", RANK | 64, frame(SET, [b"a"])
    yield "long-frame", RANK | 64, b"\xff\xff\xff\xff"
    yield "many-texts", RANK | 64, struct.pack("<IBqI", 13, CHECK, 0, 2**32 - 1)
    yield "long-text", RANK | 64, struct.pack("<IBqII", 17, CHECK, 0, 1, 2**32 - 1)
    yield "claim", STRANGER | 254, b"FSDPjob1" + b"c" * 32 + b"p" * 32 + everything
    yield "half-a-claim", STRANGER | 2, b"FSDPjob1" + b"c" * 20
    yield "http", STRANGER | 254, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def main():
    folder = os.path.join(HERE, "corpus")
    os.makedirs(folder, exist_ok=True)
    for name, how, conversation in corpus():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(bytes([how]) + conversation)


if __name__ == "__main__":
    main()
