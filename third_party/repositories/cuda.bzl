"""@local_cuda: the CUDA toolkit; @local_nccl: NCCL. Only what is built with --config=cuda looks for them."""

load("//third_party/repositories:linked.bzl", "fill")

def _cuda_impl(rctx):
    rctx.report_progress("{}: found, or up to 200 MB to download".format(rctx.attr.what))
    fill(rctx, [rctx.attr.what])

cuda_repository = repository_rule(
    implementation = _cuda_impl,
    # Looks again when Bazel starts anew: what is installed may have changed.
    local = True,
    doc = "Links to an installed CUDA toolkit or NCCL or, where there is none, to the pinned wheels' files.",
    environ = [
        "CUDA_HOME",
        "NCCL_HOME",
        "XDG_CACHE_HOME",
    ],
    attrs = {
        "build_file": attr.label(mandatory = True),
        "what": attr.string(mandatory = True, values = ["nccl", "toolkit"]),
        "_script": attr.label(default = Label("//third_party/repositories:cuda.py")),
        "_wheels": attr.label(default = Label("//third_party/repositories:wheels.py")),
    },
)
