"""LibTorch for MODULE.bazel."""

load("//third_party/repositories:libtorch.bzl", "libtorch_repository")

def _libtorch_impl(_ctx):
    libtorch_repository(name = "libtorch")

libtorch = module_extension(implementation = _libtorch_impl)
