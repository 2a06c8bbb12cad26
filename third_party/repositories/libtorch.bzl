"""@libtorch: the C++ headers and shared libraries of LibTorch, for the CPU; @libtorch_cuda: those for CUDA besides."""

load("//third_party/repositories:linked.bzl", "fill")

def _libtorch_impl(rctx):
    rctx.report_progress("LibTorch: found, or 540 MB to download")
    fill(rctx, ["--cuda"] if rctx.attr.cuda else [])

libtorch_repository = repository_rule(
    implementation = _libtorch_impl,
    # Looks again when Bazel starts anew: somebody may have cleared the cache.
    local = True,
    doc = "Links to the folder named by the environment variable LIBTORCH or, without it, to the pinned wheel's files.",
    environ = [
        "LIBTORCH",
        "XDG_CACHE_HOME",
    ],
    attrs = {
        "build_file": attr.label(default = Label("//third_party/libtorch:libtorch.BUILD")),
        "cuda": attr.bool(doc = "what LibTorch has for CUDA, instead of the rest"),
        "_script": attr.label(default = Label("//third_party/repositories:libtorch.py")),
        "_wheels": attr.label(default = Label("//third_party/repositories:wheels.py")),
    },
)
