"""Tests of the count of lines and headers on a small tree."""

import contextlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import subprocess
import tempfile
import unittest
from unittest import mock

_PATH = os.path.join(os.path.dirname(os.path.realpath(__file__)), "size")
_LOADER = importlib.machinery.SourceFileLoader("size", _PATH)
size = importlib.util.module_from_spec(importlib.util.spec_from_loader("size", _LOADER))
_LOADER.exec_module(size)

TREE = {
    "fsdp/BUILD.bazel": """
cc_library(
    name = "fully_sharded_data_parallel",
    visibility = ["//visibility:public"],
)
cc_library(
    name = "two",
    hdrs = ["a.h", "absent.h"],
    visibility = ["//visibility:public"],
)
cc_library(
    name = "private",
)
cc_library(
    name = "fake",
    testonly = True,
    visibility = ["//visibility:public"],
)
""",
    "fsdp/fully_sharded_data_parallel.h": '#include <vector>\n#include "fsdp/a.h"\n',
    "fsdp/a.h": '#include "fsdp/private.h"\n#include "fsdp/private.h"\n',
    "fsdp/private.h": '#include "fsdp/a.h"\n#include "absl/time/time.h"\n',
    "fsdp/fake.h": "\n",
    "fsdp/a.cc": "\n\n\n",
    "fsdp/a_test.cc": "\n\n",
    "comm/testing/fake.cc": "\n",
    "fsdp/tests/b.cc": "\n",
    "README.md": "\n",
}


class SizeTest(unittest.TestCase):

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        for path, text in TREE.items():
            file = pathlib.Path(temporary.name) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        for command in ["init", "-q"], ["add", "."]:
            subprocess.run(["git", *command], cwd=temporary.name, check=True)
        patch = mock.patch.object(size, "ROOT", temporary.name)
        patch.start()
        self.addCleanup(patch.stop)

    def run_size(self, *arguments, **limits):
        """The exit code and the text; limits are named by their first word."""
        every = {name: limits.get(name.split()[0], 10**9) for name in size.LIMITS}
        out = io.StringIO()
        with mock.patch.object(size, "LIMITS", every), mock.patch.object(size.sys, "argv", ["size", *arguments]), \
                contextlib.redirect_stdout(out):
            code = size.main()
        return code, out.getvalue()

    def test_what_is_counted(self):
        _, text = self.run_size()
        for name, number in {"product lines": 10, "product files": 5, "test lines": 4, "BUILD lines": 18, "public headers": 2,
                             "public headers that include private ones": 1, "headers behind the umbrella": 2}.items():
            self.assertRegex(text, rf"(?m)^{name} +{number}$")
        self.assertRegex(text, r"(?m)^fsdp +10 lines +5 files$")

    def test_limits_count_only_where_they_are_checked(self):
        self.assertEqual(self.run_size(product=10)[0], 0)
        self.assertEqual(self.run_size("--check", product=10)[0], 0)
        self.assertEqual(self.run_size(product=9)[0], 0)
        code, text = self.run_size("--check", product=9)
        self.assertEqual(code, 1)
        self.assertIn("above the limit of 9", text)


if __name__ == "__main__":
    unittest.main()
