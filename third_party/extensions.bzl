"""What is no Bazel module, for MODULE.bazel."""

load("//third_party:deps.bzl", "sources_without_module")
load("//third_party/repositories:libtorch.bzl", "libtorch_repository")

def _libtorch_impl(_ctx):
    libtorch_repository(name = "libtorch")

libtorch = module_extension(implementation = _libtorch_impl)

def _sources_impl(_ctx):
    sources_without_module()

sources = module_extension(implementation = _sources_impl)
