#!/usr/bin/env python3
"""Makes the pickles of `corpus`: what Python writes, and what nobody should read.

usage: make_corpus.py [FOLDER]
"""

import collections
import os
import pickle
import sys


class Calls:
    """Runs a command when unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed",)


def memo_bomb(levels):
    """Each list holds the one before it twice."""
    levels_of = b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(levels))
    return b"\x80\x02(]q\x00" + levels_of + b"t."


def main():
    """Writes each pickle into a file of its own."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "corpus")
    os.makedirs(folder, exist_ok=True)
    shape = (3, 5)
    value = collections.OrderedDict(step=1.5, shape=[shape, shape], name="weight", flags=(True, False, None),
                                    sizes={"a": 1, "b": -70000, "c": 1 << 40, "d": 300}, empty=[(), {}, [], ""])
    pickles = {f"value{protocol}": pickle.dumps(value, protocol) for protocol in (2, 3, 4, 5)}
    pickles["bytes"] = pickle.dumps([b"", b"abc", b"x" * 300], 4)
    pickles["many"] = pickle.dumps([str(i) for i in range(300)], 2)
    pickles["system"] = pickle.dumps(Calls(), 2)
    pickles["system_of_stack"] = pickle.dumps(Calls(), 4)
    pickles["memo_bomb"] = memo_bomb(60)
    pickles["deep"] = b"\x80\x02" + b"]" * 3000 + b"a" * 2999 + b"."
    pickles["cycle"] = b"\x80\x02]q\x00h\x00a."
    pickles["long_text"] = b"\x80\x04\x8d" + b"\xff" * 8 + b"."
    pickles["long_integer"] = b"\x80\x02\x8b\xff\xff\xff\x7f."
    pickles["large_memo"] = b"\x80\x02Nr\xff\xff\xff\xff."
    pickles["size"] = b"\x80\x02ctorch\nSize\nq\x00K\x02K\x03\x86q\x01\x85R}b."
    pickles["tensor"] = (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
                         b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQK\x00K\x02K\x03\x86K\x03K\x01\x86\x89"
                         b"ccollections\nOrderedDict\n)RtR.")
    for name, data in pickles.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)


if __name__ == "__main__":
    main()
