"""cuda_library: a library with sources for nvcc."""

load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

# Compute capabilities that objects hold code for; the last one also as PTX, for GPUs to come.
# --define=fsdp_cuda_archs=90 builds for one's own. --define=fsdp_cuda_lineinfo=1 adds the lines of the source, for
# profilers and compute-sanitizer, to objects that are several times as large then.
_DEFAULT_ARCHS = "75,80,86,90,100"

_WARNINGS = [
    "-Xcompiler=-Wall,-Wextra,-Werror",
    "--Werror=all-warnings",
]

def _gencodes(archs):
    flags = ["-gencode=arch=compute_{0},code=sm_{0}".format(arch) for arch in archs]
    return flags + ["-gencode=arch=compute_{0},code=compute_{0}".format(archs[-1])]

def _cuda_objects_impl(ctx):
    cc = find_cc_toolchain(ctx)
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    nvcc = [folder.path for folder in ctx.files._toolkit if folder.basename == "bin"][0] + "/nvcc"
    archs = ctx.var.get("fsdp_cuda_archs", _DEFAULT_ARCHS).split(",")
    objects = []
    for source in ctx.files.srcs:
        result = ctx.actions.declare_file("_objs/{}/{}.pic.o".format(ctx.label.name, source.basename))
        arguments = ctx.actions.args()
        arguments.add_all(["-c", source, "-o", result])
        arguments.add("-ccbin", cc.compiler_executable)
        arguments.add_all(["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC"])
        arguments.add("--compress-mode=size")
        if ctx.var.get("fsdp_cuda_lineinfo", "0") == "1":
            arguments.add("-lineinfo")
        arguments.add_all(_WARNINGS)
        arguments.add_all(_gencodes(archs))
        arguments.add_all(context.defines, format_each = "-D%s")
        arguments.add_all(context.quote_includes, before_each = "-I")
        arguments.add_all(context.includes, before_each = "-I")
        arguments.add_all(context.system_includes, before_each = "-isystem")
        ctx.actions.run(
            executable = nvcc,
            arguments = [arguments],
            inputs = depset([source] + ctx.files.hdrs + ctx.files._toolkit, transitive = [
                context.headers,
                cc.all_files,
            ]),
            outputs = [result],
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s with nvcc" % source.short_path,
            use_default_shell_env = True,
        )
        objects.append(result)
    return [DefaultInfo(files = depset(objects))]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "srcs": attr.label_list(allow_files = [".cu"]),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
        "_toolkit": attr.label(default = Label("//third_party/cuda:toolkit")),
    },
    doc = "The .cu files as objects for cc_library.",
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, srcs, hdrs = [], deps = [], **kwargs):
    """As cc_library, for *.cu: warnings are errors, and it is skipped without --config=cuda.

    Args:
      name: of the library.
      srcs: *.cu.
      hdrs: *.h and *.cuh.
      deps: //third_party/cuda among them.
      **kwargs: for the cc_library.
    """
    _cuda_objects(
        name = name + "_objects",
        srcs = srcs,
        hdrs = hdrs,
        visibility = ["//visibility:private"],
        deps = deps,
    )
    cc_library(
        name = name,
        srcs = [name + "_objects"],
        hdrs = hdrs,
        deps = deps,
        **kwargs
    )
