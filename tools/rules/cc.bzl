"""cc_library, cc_binary and cc_test as this project declares them.

Sources of what depends on LibTorch start with its headers precompiled (third_party/libtorch:precompiled), which is most of
what there is to compile, and tests have what all tests use. They include what they use all the same: clang-tidy reads
them without.
"""

load("@rules_cc//cc:defs.bzl", _cc_binary = "cc_binary", _cc_library = "cc_library", _cc_test = "cc_test")

# Every target has these, so that no BUILD file names them; below //base, whose parts know each other, only Abseil's.
BASE_DEPS = [
    "//base:check",
    "//base:status_macros",
]
ABSL_DEPS = [
    "@com_google_absl//absl/algorithm:container",
    "@com_google_absl//absl/base:core_headers",
    "@com_google_absl//absl/functional:function_ref",
    "@com_google_absl//absl/memory",
    "@com_google_absl//absl/status",
    "@com_google_absl//absl/status:statusor",
    "@com_google_absl//absl/strings",
    "@com_google_absl//absl/strings:str_format",
    "@com_google_absl//absl/synchronization",
    "@com_google_absl//absl/time",
    "@com_google_absl//absl/types:span",
]

# Every test has these, too.
TEST_DEPS = [
    "//base/testing:status_matchers",
    "@com_google_googletest//:gtest_main",
]

# Half of the time that tests take to compile would go into making them fast, and little of what they compute is their own.
TEST_COPTS = select({
    "//:fastbuild": ["-O0"],
    "//conditions:default": [],
})

# For sources whose every access to memory //testing/interleavings sees: as production has them, but functions stay apart,
# so that places in them have names. Those that other modes instrument for themselves are not.
WATCHED_COPTS = [
    "-O1",
    "-fno-inline",
    "-fno-optimize-sibling-calls",
    "-fno-sanitize=all",
    "-fsanitize=thread",
    "-U__SANITIZE_THREAD__",
    # About atomic_thread_fence, which the sanitizer does not know, but the checker does.
    "-Wno-unknown-warning-option",
    "-Wno-tsan",
]

_LIBTORCH = "//third_party/libtorch"

def _with_precompiled(attributes, precompiled, copts = []):
    # Options of its own have other reasons.
    if attributes.get("copts"):
        return attributes
    attributes["copts"] = copts
    deps = attributes.get("deps", [])
    takes_any = type(deps) == type([]) and _LIBTORCH in deps and attributes.get("srcs")

    # With options of its own the text would be read.
    if not takes_any:
        return attributes
    # By its whole path: clang looks for what is precompiled nowhere else.
    folder = "/".join([part for part in ["$(BINDIR)", Label(_LIBTORCH).workspace_root, "third_party/libtorch"] if part])
    attributes["copts"] = ["-include", "{}/{}.h".format(folder, precompiled)] + copts
    attributes["deps"] = deps + ["{}:{}".format(_LIBTORCH, precompiled)]
    return attributes

def _with_files(attributes, endings):
    """A target has the files of its name unless it says otherwise."""
    for attribute, ending in endings.items():
        files = native.glob([attributes["name"] + ending], allow_empty = True)
        if attribute not in attributes and files:
            attributes[attribute] = files
    return attributes

def _with_deps(attributes, deps = []):
    given = ABSL_DEPS + deps + ([] if native.package_name() == "base" else BASE_DEPS)
    attributes["deps"] = attributes.get("deps", []) + given
    return attributes

def cc_library(**attributes):
    attributes = _with_files(attributes, {"srcs": ".cc", "hdrs": ".h"})
    _cc_library(**_with_precompiled(_with_deps(attributes), "precompiled"))

def cc_binary(**attributes):
    attributes = _with_files(attributes, {"srcs": ".cc"})
    _cc_binary(**_with_precompiled(_with_deps(attributes), "precompiled"))

def cc_test(size = "small", **attributes):
    attributes = dict(_with_files(attributes, {"srcs": ".cc"}), size = size)
    if not attributes.get("srcs"):
        fail("{} has no source, and would pass without a case: name one".format(attributes["name"]))
    _cc_test(**_with_precompiled(_with_deps(attributes, TEST_DEPS), "precompiled_for_tests", TEST_COPTS))

def cc_fuzz_test(name, srcs, corpus, mutations, deps = []):
    """LLVMFuzzerTestOneInput() as a test, ..._fuzzer_test, and under libFuzzer, ..._fuzz.

    Args:
      name: of the test, which replays the files of `corpus` and as many mutations of each.
      srcs: what defines the function.
      corpus: a folder of the package.
      mutations: how many.
      deps: of the sources.
    """
    cc_test(
        name = name,
        srcs = srcs,
        data = native.glob([corpus + "/*"]),
        env = {
            "FUZZ_CORPUS": native.package_name() + "/" + corpus,
            "FUZZ_MUTATIONS": str(mutations),
        },
        deps = deps + ["//base/testing:fuzz_replay"],
    )

    # Needs clang and --config=fuzz.
    cc_binary(
        name = name.replace("_fuzzer_test", "_fuzz"),
        testonly = True,
        srcs = srcs,
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        deps = deps,
    )
