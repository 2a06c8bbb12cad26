"""Tests of the rooms check on small trees: a house in which all is well, and one fault at a time."""

import contextlib
import importlib.machinery
import importlib.util
import os
import tempfile
import unittest

_PATH = os.path.join(os.path.dirname(os.path.realpath(__file__)), "deps")
_LOADER = importlib.machinery.SourceFileLoader("deps", _PATH)
deps = importlib.util.module_from_spec(importlib.util.spec_from_loader("deps", _LOADER))
_LOADER.exec_module(deps)


@contextlib.contextmanager
def tree(files):
    with tempfile.TemporaryDirectory() as root:
        for path, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        yield root


def check(root):
    return deps.Rooms(root, deps.load_targets(root), deps.includes).run()


def findings(files):
    with tree(files) as root:
        return check(root)


def document(rows, exceptions=()):
    lines = ["| room | what it is for | may use |", "|---|---|---|"]
    lines += [f"| {room} | For {room}. | {uses} |" for room, uses in rows]
    lines += ["", "| public header | includes | because |", "|---|---|---|"]
    lines += [f"| {header} | {included} | a template |" for header, included in exceptions]
    return "\n".join(lines) + "\n"


ROWS = [("fsdp/testing", "any"), ("fsdp/model", "comm, base, LibTorch"), ("comm", "base"), ("base", "nothing")]
HOUSE = {
    "docs/rooms.md": document(ROWS),
    "fsdp/testing/BUILD.bazel": 'cc_library(name = "testing", hdrs = ["testing.h"], deps = ["//fsdp/model"])',
    "fsdp/testing/testing.h": "",
    "fsdp/model/BUILD.bazel": '''
cc_library(
    name = "model",
    hdrs = ["model.h"],
    visibility = ["//visibility:public"],
    deps = ["//base", "//comm", "//third_party/libtorch"],
)
cc_test(name = "model_test", srcs = ["model_test.cc"], deps = [":model", "//fsdp/testing"])
''',
    "fsdp/model/model.h": '#include "comm/comm.h"\n',
    "comm/BUILD.bazel": '''
package(default_visibility = ["//visibility:public"])
cc_library(name = "comm", hdrs = ["comm.h"], deps = ["//base"])
cc_library(name = "secret", hdrs = ["secret.h"], visibility = ["//visibility:private"])
''',
    "comm/comm.h": "",
    "base/BUILD.bazel": 'cc_library(name = "base", hdrs = ["base.h"])',
    "third_party/libtorch/BUILD.bazel": 'cc_library(name = "libtorch")',
}


class RoomsTest(unittest.TestCase):
    def expect(self, files, *parts):
        """One finding, with these parts."""
        found = findings({**HOUSE, **files})
        self.assertEqual(len(found), 1, found)
        for part in parts:
            self.assertIn(part, found[0])

    def test_a_house_in_order(self):
        self.assertEqual(findings(HOUSE), [])

    def test_no_table(self):
        self.expect({"docs/rooms.md": "# Architecture\n"}, "has no table | room | what it is for | may use |")

    def test_an_edge_that_the_table_does_not_allow(self):
        rows = [*ROWS[:2], ("comm", "nothing"), ROWS[3]]
        self.expect({"docs/rooms.md": document(rows)},
                    "//comm:comm may not use //base", "the row of comm", "(line 5)")

    def test_libtorch_that_the_table_does_not_allow(self):
        self.expect({"comm/BUILD.bazel": 'cc_library(name = "comm", hdrs = ["comm.h"], deps = ["//base", '
                                         '"//third_party/libtorch"], visibility = ["//visibility:public"])'},
                    "//comm:comm may not use //third_party/libtorch", "lacks LibTorch")

    def test_an_edge_that_nobody_uses(self):
        rows = [*ROWS[:3], ("base", "LibTorch")]
        self.expect({"docs/rooms.md": document(rows)},
                    "docs/rooms.md:6: base may use LibTorch, but no library in it does")

    def test_a_circle(self):
        found = findings({**HOUSE, "docs/rooms.md": document([*ROWS[:2], ("comm", "base, fsdp/model"), ROWS[3]]),
                                                "comm/BUILD.bazel": HOUSE["comm/BUILD.bazel"] +
                                              'cc_library(name = "up", srcs = ["up.cc"], deps = ["//fsdp/model"])'})
        self.assertEqual(len(found), 2, found)
        self.assertIn("docs/rooms.md:5: comm may use fsdp/model, whose row is above", found[0])
        self.assertIn("comm -> fsdp/model -> comm: rooms need each other in a circle", found[1])
        self.assertIn("//comm:up needs //fsdp/model:model, //fsdp/model:model needs //comm:comm", found[1])

    def test_a_room_without_a_row(self):
        self.expect({"fsdp/new/BUILD.bazel": 'cc_library(name = "new")'}, "fsdp/new: docs/rooms.md has no row")

    def test_a_row_for_all_below_a_folder(self):
        self.assertEqual(findings({**HOUSE, "fsdp/tests/one/BUILD.bazel": 'cc_test(name = "one_test")',
                                   "docs/rooms.md": document([("fsdp/tests/...", "any"), *ROWS])}), [])

    def test_a_row_without_a_room(self):
        found = findings({**HOUSE, "docs/rooms.md": document([("fsdp/gone", "nothing"), *ROWS])})
        self.assertIn("docs/rooms.md:3: there is no room fsdp/gone: take the row out", found)

    def test_a_name_that_no_row_has(self):
        found = findings({**HOUSE, "docs/rooms.md": document([ROWS[0], ("fsdp/model", "comm, bsae, base, LibTorch"),
                                                                     *ROWS[2:]])})
        self.assertIn("docs/rooms.md:4: fsdp/model may use bsae, which has no row: is it misspelt?", found)

    def test_a_library_that_uses_what_is_for_tests(self):
        build = HOUSE["fsdp/model/BUILD.bazel"] + 'cc_library(name = "odd", srcs = ["odd.cc"], deps = ["//fsdp/testing"])'
        found = findings({**HOUSE, "fsdp/model/BUILD.bazel": build})
        self.assertEqual(len(found), 2, found)
        self.assertIn("//fsdp/model:odd may not use //fsdp/testing", found[0])
        self.assertIn("in a circle", found[1])
        rows = [ROWS[0], ("fsdp/model", "fsdp/testing, comm, base, LibTorch"), *ROWS[2:]]
        found = findings({**HOUSE, "fsdp/model/BUILD.bazel": build, "docs/rooms.md": document(rows)})
        self.assertIn("docs/rooms.md:4: fsdp/model may not use fsdp/testing, which is for tests and programs: move what "
                      "it needs into a room of its own", found)

    def test_a_test_that_uses_a_room_above(self):
        self.expect({"comm/BUILD.bazel": HOUSE["comm/BUILD.bazel"] +
                                         'cc_test(name = "comm_test", srcs = ["t.cc"], deps = ["//fsdp/model"])'},
                    "//comm:comm_test may not use //fsdp/model: fsdp/model needs comm; move the test to fsdp/model")

    def test_a_public_header_that_includes_a_private_one(self):
        files = {"comm/comm.h": '#include "comm/secret.h"\n'}
        self.expect(files, "comm/comm.h:1: a public header includes comm/secret.h of //comm:secret, which is not public")
        exceptions = document(ROWS, [("comm/comm.h", "comm/secret.h")])
        self.assertEqual(findings({**HOUSE, **files, "docs/rooms.md": exceptions}), [])
        self.expect({"docs/rooms.md": exceptions}, "docs/rooms.md:10: comm/comm.h does not include")


if __name__ == "__main__":
    unittest.main()
