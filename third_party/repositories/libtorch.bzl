"""@libtorch: the C++ headers and shared libraries of LibTorch, for the CPU."""

def _libtorch_impl(rctx):
    rctx.report_progress("LibTorch: found, or 540 MB to download")
    result = rctx.execute(
        ["python3", rctx.path(rctx.attr._script), "--output=" + str(rctx.path("."))],
        timeout = 3600,
    )
    if result.return_code != 0:
        fail("@{}: {}".format(rctx.name, result.stderr.strip() or "python3 could not be started"))
    rctx.symlink(rctx.attr._build, "BUILD.bazel")

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
        "_build": attr.label(default = Label("//third_party/libtorch:libtorch.BUILD")),
        "_script": attr.label(default = Label("//third_party/repositories:libtorch.py")),
    },
)
