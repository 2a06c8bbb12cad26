"""libtorch_repository: LibTorch from pinned wheels, or an installed one."""

def _cache(rctx):
    env = rctx.os.environ
    base = env.get("XDG_CACHE_HOME", "") or env.get("HOME", "/var/tmp") + "/.cache"
    return base + "/libtorch_fsdp"

def _installed(rctx, folder):
    for part in ("include/ATen/ATen.h", "lib/libtorch_cpu.so", "lib/libc10.so"):
        if not rctx.path(folder + "/" + part).exists:
            fail("LIBTORCH={}: there is no {} in it".format(folder, part))
    return folder

def _fetched(rctx):
    script = rctx.path(rctx.attr._fetch)
    result = rctx.execute(["python3", script, _cache(rctx)], timeout = 3600)
    if result.return_code != 0:
        fail(result.stdout + result.stderr)
    return result.stdout.strip()

def _libtorch_repository_impl(rctx):
    installed = rctx.os.environ.get("LIBTORCH", "")
    folder = _installed(rctx, installed) if installed else _fetched(rctx)
    rctx.symlink(folder + "/include", "include")
    rctx.symlink(folder + "/lib", "lib")

    # Wheels bring these along under names with a version; an installed
    # LibTorch for CPU may have none of them.
    optional = [
        "lib/" + name
        for name in ("libgomp.so.1", "libcudart.so.13", "libcupti.so.13")
        if rctx.path(folder + "/lib/" + name).exists
    ]
    rctx.template(
        "BUILD.bazel",
        rctx.attr._build,
        substitutions = {"{optional_libraries}": repr(optional)},
    )

libtorch_repository = repository_rule(
    implementation = _libtorch_repository_impl,
    attrs = {
        "_build": attr.label(default = Label("//third_party/libtorch:libtorch.BUILD.tpl")),
        "_fetch": attr.label(default = Label("//third_party/libtorch:fetch_libtorch.py")),
    },
    environ = ["LIBTORCH", "XDG_CACHE_HOME", "PIP_FIND_LINKS", "PIP_NO_INDEX"],
    local = True,
)
