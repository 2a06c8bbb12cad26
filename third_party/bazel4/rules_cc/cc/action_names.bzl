"""Names of what C++ toolchains do."""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", _cpp_compile = "CPP_COMPILE_ACTION_NAME")

CPP_COMPILE_ACTION_NAME = _cpp_compile
