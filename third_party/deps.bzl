"""Declares what this repository needs; a repository of that name that is there already wins."""

load("//third_party/libtorch:repository.bzl", "libtorch_repository")
load("//third_party/sources:repository.bzl", "source_archive")

def deps():
    """External repositories of @libtorch_fsdp, for a WORKSPACE file."""
    existing = native.existing_rules()
    if "com_google_absl" not in existing:
        source_archive(
            name = "com_google_absl",
            urls = ["https://github.com/abseil/abseil-cpp/archive/20220623.1.tar.gz"],
            sha256 = "91ac87d30cc6d79f9ab974c51874a704de9c2647c40f6932597329a282217ba8",
            strip_prefix = "abseil-cpp-20220623.1",
            debian_package = "abseil",
            debian_archive = "abseil_20220623.1.orig.tar.gz",
            debian_sha256 = "abfe2897f3a30edaa74bc34365afe3c2a3cd012091a97dc7e008f7016adcd5fe",
            debian_strip_prefix = "abseil-20220623.1",
        )
    if "com_google_googletest" not in existing:
        source_archive(
            name = "com_google_googletest",
            urls = ["https://github.com/google/googletest/archive/release-1.12.1.tar.gz"],
            sha256 = "81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2",
            strip_prefix = "googletest-release-1.12.1",
            debian_package = "googletest",
            debian_archive = "googletest_1.12.1.orig.tar.gz",
            debian_sha256 = "81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2",
            debian_strip_prefix = "googletest-release-1.12.1",
        )
    if "com_github_google_benchmark" not in existing:
        source_archive(
            name = "com_github_google_benchmark",
            urls = ["https://github.com/google/benchmark/archive/v1.7.1.tar.gz"],
            sha256 = "6430e4092653380d9dc4ccb45a1e2dc9259d581f4866dc0759713126056bc1d7",
            strip_prefix = "benchmark-1.7.1",
            debian_package = "benchmark",
            debian_archive = "benchmark_1.7.1.orig.tar.gz",
            debian_sha256 = "6430e4092653380d9dc4ccb45a1e2dc9259d581f4866dc0759713126056bc1d7",
            debian_strip_prefix = "benchmark-1.7.1",
        )
    if "libtorch" not in existing:
        libtorch_repository(name = "libtorch")
