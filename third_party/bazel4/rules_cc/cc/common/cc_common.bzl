"""How rules of one's own compile C++."""

load("//cc:native.bzl", "native_cc_common")

cc_common = native_cc_common
