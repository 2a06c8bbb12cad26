"""install: the library as a folder that other build systems use."""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

def _link(ctx, deps):
    """All archives behind `deps` as one shared library, which names LibTorch's libraries but no folders."""
    toolchain = find_cc_toolchain(ctx)
    soversion = ".".join(ctx.attr.version.split(".")[:2])
    result = ctx.actions.declare_file("{}_/liblibtorch_fsdp.so.{}".format(ctx.label.name, soversion))
    archives, shared, flags = [], [], []
    for linked in deps.linking_context.linker_inputs.to_list():
        flags += linked.user_link_flags
        for library in linked.libraries:
            archive = library.pic_static_library or library.static_library
            if archive:
                archives.append(archive)
            else:
                shared.append(library.resolved_symlink_dynamic_library or library.dynamic_library)
    arguments = ctx.actions.args()
    arguments.use_param_file("@%s")
    arguments.set_param_file_format("multiline")
    arguments.add_all(["-shared", "-o", result, "-Wl,-soname," + result.basename])
    arguments.add_all(["-Wl,-z,relro,-z,now", "-Wl,--as-needed"])
    arguments.add(ctx.file._exports, format = "-Wl,--version-script=%s")
    if ctx.var["COMPILATION_MODE"] != "dbg":
        arguments.add("-Wl,--strip-debug")
    arguments.add_all(["-Wl,--whole-archive"] + archives + ["-Wl,--no-whole-archive"] + shared)
    arguments.add_all(flags + ctx.fragments.cpp.linkopts + ["-lstdc++", "-lm"])
    ctx.actions.run(
        executable = toolchain.compiler_executable,
        arguments = [arguments],
        inputs = depset(archives + shared + [ctx.file._exports], transitive = [toolchain.all_files]),
        outputs = [result],
        mnemonic = "CppLinkInstalled",
        progress_message = "Linking %s" % result.short_path,
        use_default_shell_env = True,
    )
    return result

def _place(header):
    """Where a header is in `include`, and where it is here."""
    path = header.short_path
    return "{}={}".format("/".join(path.split("/")[2:]) if path.startswith("../") else path, header.path)

def _install_impl(ctx):
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    result = ctx.actions.declare_file(ctx.label.name + ".tar.gz")
    library = _link(ctx, deps)
    public = [header for dep in ctx.attr.deps for header in dep[CcInfo].compilation_context.direct_public_headers]
    arguments = ctx.actions.args()
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    arguments.add(result, format = "--output=%s")
    arguments.add(library, format = "--library=%s")
    arguments.add(ctx.file._libtorch, format = "--libtorch=%s")
    arguments.add(ctx.attr.version, format = "--version=%s")
    arguments.add("--cuda=ON" if ctx.var.get("fsdp_cuda") == "1" else "--cuda=OFF")
    headers = deps.compilation_context.headers
    arguments.add_all(public, map_each = _place, format_each = "--public=%s")
    arguments.add_all(headers, map_each = _place, format_each = "--header=%s")
    arguments.add_all(ctx.files.templates, format_each = "--template=%s")
    for target, name in ctx.attr.licenses.items():
        arguments.add(target.files.to_list()[0], format = "--license={}=%s".format(name))
    ctx.actions.run(
        executable = ctx.executable._lay_out,
        arguments = [arguments],
        inputs = depset([library] + ctx.files.templates + ctx.files.licenses, transitive = [headers]),
        outputs = [result],
        mnemonic = "Install",
        progress_message = "Packing %s" % result.short_path,
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([result])), OutputGroupInfo(public_headers = depset(public))]

install = rule(
    implementation = _install_impl,
    attrs = {
        "deps": attr.label_list(
            providers = [CcInfo],
            doc = "whose headers are public; what they depend on is linked, and gives the headers that these include",
        ),
        "licenses": attr.label_keyed_string_dict(allow_files = True, doc = "of all that is linked: 'name SPDX-expression'"),
        "templates": attr.label_list(allow_files = True, doc = "files in which @NAME@ is replaced"),
        "version": attr.string(doc = "whose first two numbers are the shared library's"),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
        "_exports": attr.label(default = Label("//package:exports.lds"), allow_single_file = True),
        "_lay_out": attr.label(default = Label("//package:lay_out"), executable = True, cfg = "exec"),
        "_libtorch": attr.label(default = Label("//third_party/libtorch:headers"), allow_single_file = True),
    },
    doc = "NAME.tar.gz with include, lib and share.",
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
