"""Everything that the WORKSPACE of this repository, or one that uses it as @libtorch_fsdp, has to declare."""

load("@bazel_tools//tools/build_defs/repo:http.bzl", "http_archive")
load("//third_party/repositories:archive.bzl", "source_archive")
load("//third_party/repositories:cuda.bzl", "cuda_repository")
load("//third_party/repositories:libtorch.bzl", "libtorch_repository")

# Names of repositories are those of Bazel's own examples; MODULE.bazel gives the modules the same names.
_SOURCES = {
    "com_google_absl": dict(
        debian_package = "abseil",
        sha256 = "91ac87d30cc6d79f9ab974c51874a704de9c2647c40f6932597329a282217ba8",
        strip_prefixes = {
            "91ac87d30cc6d79f9ab974c51874a704de9c2647c40f6932597329a282217ba8": "abseil-cpp-20220623.1",
            # Debian packed the same tree again.
            "abfe2897f3a30edaa74bc34365afe3c2a3cd012091a97dc7e008f7016adcd5fe": "abseil-20220623.1",
        },
        urls = ["https://github.com/abseil/abseil-cpp/archive/20220623.1.tar.gz"],
    ),
    "com_google_googletest": dict(
        debian_package = "googletest",
        sha256 = "81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2",
        strip_prefixes = {
            "81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2": "googletest-release-1.12.1",
        },
        urls = ["https://github.com/google/googletest/archive/release-1.12.1.tar.gz"],
    ),
    "com_github_google_benchmark": dict(
        debian_package = "benchmark",
        sha256 = "6430e4092653380d9dc4ccb45a1e2dc9259d581f4866dc0759713126056bc1d7",
        strip_prefixes = {
            "6430e4092653380d9dc4ccb45a1e2dc9259d581f4866dc0759713126056bc1d7": "benchmark-1.7.1",
        },
        urls = ["https://github.com/google/benchmark/archive/v1.7.1.tar.gz"],
    ),
}

# No Bazel module: extensions.bzl declares these for MODULE.bazel.
_SOURCES_WITHOUT_MODULE = {
    "com_github_axboe_liburing": dict(
        build_file = Label("//third_party/liburing:liburing.BUILD"),
        debian_package = "liburing",
        sha256 = "60b367dbdc6f2b0418a6e0cd203ee0049d9d629a36706fcf91dfb9428bae23c8",
        strip_prefixes = {
            "60b367dbdc6f2b0418a6e0cd203ee0049d9d629a36706fcf91dfb9428bae23c8": "liburing-liburing-2.3",
            # Debian took the maintainer's own archive.
            "2eac26f880125d83f75ba8641fde5d88226dd352d3cee95d45a9128758a8f1be": "liburing-2.3",
        },
        urls = ["https://github.com/axboe/liburing/archive/refs/tags/liburing-2.3.tar.gz"],
    ),
    "com_github_mbedtls": dict(
        build_file = Label("//third_party/mbedtls:mbedtls.BUILD"),
        debian_package = "mbedtls",
        sha256 = "bdf7c5bbdc338da3edad89b2885d4f8668f9a6fffeba6ec17a60333e36dade6f",
        strip_prefixes = {
            "bdf7c5bbdc338da3edad89b2885d4f8668f9a6fffeba6ec17a60333e36dade6f": "mbedtls-2.28.3",
            # Debian packed the same tree again.
            "3b4953aa55a681e084d31892d9904cc5328d6b4958ea57b90ae4b4f94ae69a8d": "Mbed-TLS-mbedtls-8f97ca5",
        },
        urls = ["https://github.com/Mbed-TLS/mbedtls/archive/refs/tags/v2.28.3.tar.gz"],
    ),
    "com_github_facebook_rocksdb": dict(
        build_file = Label("//third_party/crc32c:rocksdb.BUILD"),
        debian_package = "rocksdb",
        sha256 = "b85408a374770897332bf15e51620a5f35720dd416a4749e3899057f9cfaf84d",
        strip_prefixes = {
            "b85408a374770897332bf15e51620a5f35720dd416a4749e3899057f9cfaf84d": "rocksdb-7.8.3",
        },
        urls = ["https://github.com/facebook/rocksdb/archive/v7.8.3.tar.gz"],
    ),
}

# What is found on the machine or taken from pinned wheels, each when something that is built needs it.
_INSTALLED = {
    "libtorch": (libtorch_repository, {}),
    "libtorch_cuda": (libtorch_repository, dict(
        build_file = Label("//third_party/libtorch:libtorch_cuda.BUILD"),
        cuda = True,
    )),
    "local_cuda": (cuda_repository, dict(
        build_file = Label("//third_party/cuda:local_cuda.BUILD"),
        what = "toolkit",
    )),
    "local_nccl": (cuda_repository, dict(
        build_file = Label("//third_party/nccl:local_nccl.BUILD"),
        what = "nccl",
    )),
}

def installed():
    for name, (repository, attributes) in _INSTALLED.items():
        repository(name = name, **attributes)

def sources_without_module():
    for name, source in _SOURCES_WITHOUT_MODULE.items():
        source_archive(name = name, **source)

def deps():
    """Declares what the workspace has not declared before: a repository of the same name that is there already wins."""

    # Bazel 7 would take 0.0.9, which lacks cc/common.
    if not native.existing_rule("rules_cc"):
        http_archive(
            name = "rules_cc",
            sha256 = "abc605dd850f813bb37004b77db20106a19311a96b2da1c92b789da529d28fe1",
            strip_prefix = "rules_cc-0.0.17",
            urls = ["https://github.com/bazelbuild/rules_cc/releases/download/0.0.17/rules_cc-0.0.17.tar.gz"],
        )
    for name, source in _SOURCES.items() + _SOURCES_WITHOUT_MODULE.items():
        if not native.existing_rule(name):
            source_archive(name = name, **source)
    for name, (repository, attributes) in _INSTALLED.items():
        if not native.existing_rule(name):
            repository(name = name, **attributes)
