"""What a C++ library tells those who depend on it."""

load("//cc:native.bzl", "native_cc_info")

CcInfo = native_cc_info
