"""Bazel's own names, which a file cannot define again under the same name."""

native_cc_info = CcInfo
native_cc_common = cc_common
