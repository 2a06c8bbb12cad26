"""install: the library as a folder that other build systems use, and as a wheel for pip."""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

# Where pip puts LibTorch's libraries and those of CUDA, beside the folder that has this library's in `lib`.
_PLACES = ["torch/lib"]
_CUDA_PLACES = _PLACES + ["nvidia/cu13/lib", "nvidia/nccl/lib"]

# What libtorch_cuda.so needs as well, and finds where it lies. The library leaves them to it: as a program's run path does
# not hold for what its libraries need, the folder of a LibTorch that is elsewhere would have to be in LD_LIBRARY_PATH.
_BROUGHT_BY_TORCH_CUDA = ["libc10_cuda", "libcudart", "libnccl"]

_ProgramInfo = provider(doc = "What a program is linked from.", fields = ["cc_info", "objects"])

def _program_impl(target, ctx):
    return [_ProgramInfo(
        cc_info = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.rule.attr.deps]),
        objects = target[OutputGroupInfo].compilation_outputs.to_list(),
    )]

_program = aspect(implementation = _program_impl)

def _inputs(cc_info):
    """What is linked with a target: archives, shared libraries and flags."""
    archives, shared, flags = [], [], []
    for linked in cc_info.linking_context.linker_inputs.to_list():
        flags += linked.user_link_flags
        for library in linked.libraries:
            archive = library.pic_static_library or library.static_library
            if archive:
                archives.append(archive)
            else:
                shared.append(library.resolved_symlink_dynamic_library or library.dynamic_library)
    return struct(archives = archives, shared = shared, flags = flags)

def _link(ctx, name, whole, others, flags):
    """All of `whole` and what it needs of `others` as one file, which looks for libraries beside itself alone."""
    toolchain = find_cc_toolchain(ctx)
    result = ctx.actions.declare_file("{}_/{}".format(ctx.label.name, name))
    places = _CUDA_PLACES if _has_cuda(ctx) else _PLACES
    arguments = ctx.actions.args()
    arguments.use_param_file("@%s")
    arguments.set_param_file_format("multiline")
    arguments.add_all(["-o", result, "-Wl,-z,relro,-z,now", "-Wl,--enable-new-dtags"])
    arguments.add_all(places, format_each = "-Wl,-rpath,$ORIGIN/../../%s")
    if ctx.var["COMPILATION_MODE"] != "dbg":
        arguments.add("-Wl,--strip-debug")
    arguments.add_all(["-Wl,--whole-archive", "-Wl,--no-as-needed"] + whole)
    arguments.add_all(["-Wl,--no-whole-archive", "-Wl,--as-needed"] + others)
    arguments.add_all(flags + ctx.fragments.cpp.linkopts + ["-lstdc++", "-lm"])
    ctx.actions.run(
        executable = toolchain.compiler_executable,
        arguments = [arguments],
        inputs = depset(whole + others + [ctx.file._exports], transitive = [toolchain.all_files]),
        outputs = [result],
        mnemonic = "CppLinkInstalled",
        progress_message = "Linking %s" % result.short_path,
        use_default_shell_env = True,
    )
    return result

def _has_cuda(ctx):
    return ctx.var.get("fsdp_cuda") == "1"

def _place(header):
    """Where a header is in `include`, and where it is here."""
    path = header.short_path
    return "{}={}".format("/".join(path.split("/")[2:]) if path.startswith("../") else path, header.path)

def _install_impl(ctx):
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    inputs = _inputs(deps)
    soname = "liblibtorch_fsdp.so." + ".".join(ctx.attr.version.split(".")[:2])
    exports = "-Wl,--version-script=" + ctx.file._exports.path
    flags = ["-shared", "-Wl,-soname," + soname, exports] + inputs.flags
    shared = [file for file in inputs.shared if file.basename.split(".")[0] not in _BROUGHT_BY_TORCH_CUDA]
    library = _link(ctx, soname, inputs.archives, shared, flags)
    public = [header for dep in ctx.attr.deps for header in dep[CcInfo].compilation_context.direct_public_headers]
    arguments = ctx.actions.args()
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    arguments.add(library, format = "--library=%s")
    arguments.add(ctx.file._libtorch, format = "--libtorch=%s")
    arguments.add(ctx.attr.version, format = "--version=%s")
    arguments.add("--cuda=ON" if _has_cuda(ctx) else "--cuda=OFF")
    headers = deps.compilation_context.headers
    arguments.add_all(public, map_each = _place, format_each = "--public=%s")
    arguments.add_all(headers, map_each = _place, format_each = "--header=%s")
    arguments.add_all(ctx.files.templates, format_each = "--template=%s")
    for target, name in ctx.attr.licenses.items():
        arguments.add(target.files.to_list()[0], format = "--license={}=%s".format(name))

    programs = []
    for target in ctx.attr.programs:
        name = "fsdp-" + target.label.name.replace("_cuda", "")
        own = _inputs(target[_ProgramInfo].cc_info)

        # From the archives is taken only what the library does not export.
        whole = target[_ProgramInfo].objects + [library]
        flags = ["-Wl,-rpath,$ORIGIN/../lib"] + own.flags
        programs.append(_link(ctx, name, whole, own.archives + own.shared, flags))

    archive = ctx.actions.declare_file(ctx.label.name + ".tar.gz")
    wheel = ctx.actions.declare_directory("wheel")
    for result, added in [(archive, []), (wheel, programs)]:
        of_result = ctx.actions.args()
        of_result.add(result.path, format = "--output=%s")
        of_result.add_all(added, format_each = "--program=%s")
        ctx.actions.run(
            executable = ctx.executable._lay_out,
            arguments = [arguments, of_result],
            inputs = depset([library] + added + ctx.files.templates + ctx.files.licenses, transitive = [headers]),
            outputs = [result],
            mnemonic = "Install",
            progress_message = "Packing %s" % result.short_path,
            use_default_shell_env = True,
        )
    return [
        DefaultInfo(files = depset([archive])),
        OutputGroupInfo(public_headers = depset(public), wheel = depset([wheel])),
    ]

install = rule(
    implementation = _install_impl,
    attrs = {
        "deps": attr.label_list(
            providers = [CcInfo],
            doc = "whose headers are public; what they depend on is linked, and gives the headers that these include",
        ),
        "licenses": attr.label_keyed_string_dict(allow_files = True, doc = "of all that is linked: 'name SPDX-expression'"),
        "programs": attr.label_list(aspects = [_program], doc = "of the wheel: fsdp-NAME there is cc_binary NAME or NAME_cuda"),
        "templates": attr.label_list(allow_files = True, doc = "files in which @NAME@ is replaced"),
        "version": attr.string(doc = "whose first two numbers are the shared library's"),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
        "_exports": attr.label(default = Label("//package:exports.lds"), allow_single_file = True),
        "_lay_out": attr.label(default = Label("//package:lay_out"), executable = True, cfg = "exec"),
        "_libtorch": attr.label(default = Label("//third_party/libtorch:headers"), allow_single_file = True),
    },
    doc = """NAME.tar.gz with include, lib and share; in the output group `wheel` a folder with a wheel.

The wheel's name says what it runs on, which is known when it has been built.""",
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
