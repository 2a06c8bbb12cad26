"""What is no Bazel module, for MODULE.bazel."""

load("//third_party:deps.bzl", "installed", "sources_without_module")

def _libtorch_impl(_ctx):
    installed()

libtorch = module_extension(implementation = _libtorch_impl)

def _sources_impl(_ctx):
    sources_without_module()

sources = module_extension(implementation = _sources_impl)
