"""Tests tools/checks/modules with a Bazel that answers from a list."""

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import tempfile
import unittest

HERE = os.path.dirname(os.path.realpath(__file__))


def load_modules():
    loader = importlib.machinery.SourceFileLoader("modules", os.path.join(HERE, "modules"))
    modules = importlib.util.module_from_spec(importlib.util.spec_from_loader("modules", loader))
    loader.exec_module(modules)
    return modules


modules = load_modules()

MODULE = """module(name = "ours", version = "1")
bazel_dep(name = "rules_cc", version = "0.0.17")
bazel_dep(
    name = "abseil-cpp",
    version = "20240116.2",
    repo_name = "com_google_absl",
)
bazel_dep(name = "overridden")
things = use_extension("//third_party:extensions.bzl", "things")
others = use_extension("@rules_cc//cc:extensions.bzl", "others")
"""


class FakeBazel:
    """Gives its answers in turn, the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    def run(self, *arguments):
        self.calls.append(arguments)
        code, text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return subprocess.CompletedProcess(arguments, code, stdout="", stderr=text)


def lacks(name):
    return 1, f"ERROR: in module dependency chain <root> -> {name}: module {name} not found in registries: [file:///x]"


class ParsingTest(unittest.TestCase):

    def test_versions_of_bazel(self):
        for text, number in [("bazel 7.7.1", 7), ("bazel 8.0.0-pre.1", 8), ("bazel 10.1", 10),
                             ("bazel no_version", None), ("", None)]:
            self.assertEqual(modules.major(text), number, text)

    def test_what_a_module_file_asks_for(self):
        self.assertEqual(modules.wanted(MODULE), {("rules_cc", "0.0.17"), ("abseil-cpp", "20240116.2")})
        self.assertEqual(modules.extensions(MODULE), ["<root>//third_party:extensions.bzl%things"])

    def test_what_bazel_lacks(self):
        self.assertEqual(modules.lacking(lacks("zlib@1.3.1.bcr.3")[1]), {("zlib", "1.3.1.bcr.3")})
        self.assertEqual(modules.lacking("ERROR: no such package"), set())


class RegistryTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.registry = modules.Registry(os.path.join(folder.name, "registry"))

    def read(self, path):
        with open(os.path.join(self.registry.folder, path), encoding="utf-8") as file:
            return file.read()

    def test_a_stand_in_has_its_version_and_a_source(self):
        self.registry.add("zlib", "1.3.1")
        self.assertEqual(self.read("modules/zlib/1.3.1/MODULE.bazel"), 'module(name = "zlib", version = "1.3.1")\n')
        source = json.loads(self.read("modules/zlib/1.3.1/source.json"))
        base = json.loads(self.read("bazel_registry.json"))["module_base_path"]
        self.assertEqual(source["type"], "local_path")
        self.read(os.path.join(base, source["path"], "MODULE.bazel"))

    def test_rules_are_those_of_the_tree(self):
        self.registry.add("rules_cc", "0.0.11")
        self.registry.add("rules_cc", "0.0.17")
        self.assertIn("cc_library", self.read("sources/rules_cc/cc/defs.bzl"))

    def test_modules_are_added_until_none_is_lacking(self):
        bazel = FakeBazel(lacks("zlib@1.3"), lacks("rules_java@7.6.5"), (0, ""))
        self.assertEqual(modules.resolve(bazel, self.registry).returncode, 0)
        self.assertEqual(self.registry.modules, {("zlib", "1.3"), ("rules_java", "7.6.5")})
        self.assertEqual(len(bazel.calls), 3)

    def test_another_error_and_one_that_stays_end_it(self):
        for answer in [(1, "ERROR: MODULE.bazel:3: syntax error"), lacks("zlib@1.3")]:
            bazel = FakeBazel(answer)
            self.assertEqual(modules.resolve(bazel, self.registry).returncode, 1)
            self.assertLessEqual(len(bazel.calls), 2)

    def test_what_is_wrong_is_told_with_its_step(self):
        self.assertIsNone(modules.check(FakeBazel((0, "")), self.registry))
        self.assertEqual(modules.check(FakeBazel((1, "syntax error\n")), self.registry), "MODULE.bazel: syntax error")
        wrong = modules.check(FakeBazel((0, ""), (1, "no such extension")), self.registry)
        self.assertEqual(wrong, "<root>//third_party:extensions.bzl%libtorch: no such extension")


if __name__ == "__main__":
    unittest.main()
