"""Tests of the deps check on small trees."""

import importlib.machinery
import importlib.util
import os
import tempfile
import unittest

_PATH = os.path.join(os.path.dirname(os.path.realpath(__file__)), "deps")
_LOADER = importlib.machinery.SourceFileLoader("deps", _PATH)
deps = importlib.util.module_from_spec(importlib.util.spec_from_loader("deps", _LOADER))
_LOADER.exec_module(deps)


def findings(files):
    with tempfile.TemporaryDirectory() as root:
        for path, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        return deps.Checker(root).run()


LIBTORCH = {"third_party/libtorch/BUILD.bazel": '''
alias(name = "libtorch", actual = "@libtorch//:libtorch")
cc_library(name = "cuda")
cc_library(name = "c10_cuda")
'''}
BASE = {
    **LIBTORCH,
    "base/BUILD.bazel": 'cc_library(name = "base", hdrs = ["base.h"])',
    "base/base.h": "#include <string>\n",
}


class DepsTest(unittest.TestCase):
    def test_a_tree_without_faults(self):
        self.assertEqual(findings({
            **BASE,
            "fsdp/BUILD.bazel": '''
cc_library(
    name = "fsdp",
    srcs = ["fsdp.cc"],
    hdrs = glob(["*.h"]),
    deps = ["//base", "//third_party/libtorch", "@com_google_absl//absl/strings"] + select({"//:cuda": []}),
)
[cc_test(
    name = name,
    srcs = [name + ".cc"],
    deps = [":fsdp", "@com_google_googletest//:gtest_main"],
) for name in ["a_test"]]
''',
            "fsdp/fsdp.h": "#include <torch/nn/module.h>\n#include \"base/base.h\"\n",
            "fsdp/fsdp.cc": "#include \"fsdp/fsdp.h\"\n#include \"absl/strings/str_cat.h\"\n",
            "fsdp/a_test.cc": "#include \"fsdp/fsdp.h\"\n#include \"gtest/gtest.h\"\n",
        }), [])

    def test_what_every_test_has(self):
        files = {
            **BASE,
            "tools/rules/cc.bzl": 'load("@rules_cc//cc:defs.bzl", "x")\nABSL_DEPS, BASE_DEPS = [], []\nTEST_DEPS = ["@com_google_absl//absl/strings"]\n',
            "base/BUILD.bazel": BASE["base/BUILD.bazel"] + '''
load("//tools/rules:cc.bzl", "cc_test")
cc_test(name = "a_test", srcs = ["a_test.cc"], deps = ["//third_party/libtorch"])
''',
            "base/a_test.cc": "#include \"absl/strings/str_cat.h\"\n#include <ATen/core/Tensor.h>\n",
        }
        on_deps = lambda: [text for text in findings(files) if "dep @" in text]
        self.assertEqual(on_deps(), [])
        with_it = files["base/BUILD.bazel"]
        files["base/BUILD.bazel"] = with_it.replace(
            '"//third_party/libtorch"', '"//third_party/libtorch", "@com_google_absl//absl/strings"')
        self.assertEqual(len(on_deps()), 1)
        self.assertIn("it has the dep @com_google_absl//absl/strings", on_deps()[0])
        files["base/BUILD.bazel"] = with_it.replace('load("//tools/rules:cc.bzl", "cc_test")', "")
        self.assertEqual(len(on_deps()), 1)
        self.assertIn("includes absl/strings/str_cat.h without the dep @com_google_absl//absl/strings", on_deps()[0])

    def test_a_rule_that_is_not_loaded(self):
        found = findings({
            **BASE,
            "tools/rules/cc.bzl": "ABSL_DEPS, BASE_DEPS, TEST_DEPS = [], [], []\n",
            "offload/BUILD.bazel": 'load("//tools/rules:cc.bzl", "cc_test")\ncc_library(name = "offload")\n',
        })
        self.assertIn("//offload:offload: load cc_library from //tools/rules:cc.bzl: Bazel 9 has none of its own", found)

    def test_a_header_without_its_dependency(self):
        for include, label in [("absl/status/statusor.h", "@com_google_absl//absl/status:statusor"),
                               ("ATen/core/Tensor.h", "//third_party/libtorch:libtorch"),
                               ("base/base.h", "//base:base")]:
            self.assertEqual(findings({
                **BASE,
                "fsdp/BUILD.bazel": 'cc_library(name = "fsdp", srcs = ["fsdp.cc"])',
                "fsdp/fsdp.cc": f"\n#include \"{include}\"\n",
            }), [f"fsdp/fsdp.cc:2: //fsdp:fsdp includes {include} without the dep {label}"])

    def test_a_header_that_one_of_two_programs_includes(self):
        def found(attributes):
            return findings({
                **BASE,
                "fsdp/BUILD.bazel": f'cc_library(name = "fsdp", srcs = ["fsdp.cc"], {attributes})',
                "fsdp/fsdp.cc": "\n#ifdef WITH_BASE\n#include \"base/base.h\"\n#endif\n",
            })
        self.assertEqual(found(""), [])
        self.assertEqual(found('local_defines = ["WITH_BASE"]'),
                         ["fsdp/fsdp.cc:3: //fsdp:fsdp includes base/base.h without the dep //base:base"])

    def test_a_dependency_that_nothing_includes(self):
        self.assertEqual(findings({
            **BASE,
            "fsdp/BUILD.bazel": 'cc_library(name = "fsdp", srcs = ["fsdp.cc"], deps = ["//base"])',
            "fsdp/fsdp.cc": "/*\n#include \"base/base.h\"\n*/\n// #include \"base/base.h\"\n",
        }), ["//fsdp:fsdp: the dep //base is not included by any of its files"])

    def test_headers_of_cuda_have_targets_of_their_own(self):
        for include, label in [("ATen/cuda/CUDAGraph.h", "//third_party/libtorch:cuda"),
                               ("cuda_runtime_api.h", "//third_party/cuda:cuda"), ("nccl.h", "//third_party/nccl:nccl")]:
            self.assertEqual(findings({
                **BASE,
                "comm/BUILD.bazel": 'cc_library(name = "comm", srcs = ["comm.cc"], deps = ["//third_party/libtorch"])',
                "comm/comm.cc": f"#include <ATen/core/Tensor.h>\n#include <{include}>\n",
            }), [f"comm/comm.cc:2: //comm:comm includes {include} without the dep {label}"])

    def test_streams_of_cuda_need_one_library_alone(self):
        for label in ["//third_party/libtorch:c10_cuda", "//third_party/libtorch:cuda"]:
            self.assertEqual(findings({
                **BASE,
                "comm/BUILD.bazel": f'cc_library(name = "comm", srcs = ["comm.cc"], deps = ["{label}"])',
                "comm/comm.cc": "#include <c10/cuda/CUDAStream.h>\n",
            }), [])

    def test_a_target_without_files_gathers_others(self):
        self.assertEqual(findings({
            **BASE,
            "fsdp/BUILD.bazel": 'cc_library(name = "fsdp", deps = ["//base"])',
        }), [])

    def test_libtorch_behind_a_pure_target(self):
        found = findings({
            **LIBTORCH,
            "base/BUILD.bazel": 'cc_library(name = "base", hdrs = ["base.h"], deps = ["//third_party/libtorch"])',
            "base/base.h": "#include <c10/util/Exception.h>\n",
            "fsdp/schedule/BUILD.bazel": 'cc_library(name = "schedule", hdrs = ["schedule.h"], deps = ["//base"])',
            "fsdp/schedule/schedule.h": "#include \"base/base.h\"\n",
        })
        self.assertEqual(found, ["//fsdp/schedule:schedule must not need LibTorch: "
                                 "//fsdp/schedule:schedule -> //base:base -> //third_party/libtorch:libtorch"])

    def test_a_folder_with_the_name_of_a_header(self):
        self.assertEqual(findings({
            **BASE,
            "base/base.h": "#include <memory>\n",
            "base/memory/BUILD.bazel": 'cc_library(name = "memory", hdrs = ["pool.h"])',
            "base/memory/pool.h": "",
        }), [])

    def test_a_file_of_no_target(self):
        self.assertEqual(findings({**BASE, "base/lost.cc": ""}), ["base/lost.cc belongs to no target"])

    def test_an_include_that_is_not_written_from_the_root(self):
        self.assertEqual(len(findings({**BASE, "base/base.h": "#include \"other.h\"\n", "base/other.h": "",
                                       "base/BUILD.bazel": 'cc_library(name = "base", hdrs = ["base.h"])\n'
                                                           'cc_library(name = "other", hdrs = ["other.h"])'})), 1)

    def test_targets_that_a_document_names(self):
        self.assertEqual(findings({
            **BASE,
            "README.md": "`./bazelw test //base:base //base:all`, //base:base.h, @other//base:x, //none:x, //base:gone.",
        }), ["README.md names //base:gone, which is not there"])


if __name__ == "__main__":
    unittest.main()
