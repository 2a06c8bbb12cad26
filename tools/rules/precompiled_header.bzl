"""precompiled_header: what many sources include first, parsed once."""

load("@rules_cc//cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

# With the templates that end of the text would instantiate, and without times.
_CLANG_COPTS = ["-fpch-instantiate-templates", "-Xclang", "-fno-pch-timestamp"]

def _compile(ctx, toolchain, context, header):
    """As the toolchain compiles sources with this build's options, but for what comes out."""
    result = ctx.actions.declare_file(header.basename + ".gch")
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        source_file = header.path,
        output_file = result.path,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts + ["-xc++-header"] +
                             (_CLANG_COPTS if toolchain.compiler == "clang" else []),
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        use_pic = True,
    )
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = CPP_COMPILE_ACTION_NAME,
        ),
        arguments = cc_common.get_memory_inefficient_command_line(
            feature_configuration = features,
            action_name = CPP_COMPILE_ACTION_NAME,
            variables = variables,
        ),
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = CPP_COMPILE_ACTION_NAME,
            variables = variables,
        ),
        inputs = depset([header], transitive = [context.headers, toolchain.all_files]),
        outputs = [result],
        mnemonic = "CppPrecompile",
        progress_message = "Precompiling %s" % header.short_path,
    )
    return result

def _precompiled_header_impl(ctx):
    toolchain = find_cc_toolchain(ctx)
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])

    # Not beside the source, where the compiler would find that one first.
    header = ctx.actions.declare_file(ctx.label.name + ".h")
    ctx.actions.expand_template(template = ctx.file.src, output = header, substitutions = {})
    headers = [header]

    # Clang's kind of precompiled header holds paths, which are those of one sandbox unless bazelw's wrapper runs it.
    if "clang-in-cwd" in toolchain.compiler_executable or toolchain.compiler != "clang":
        headers.append(_compile(ctx, toolchain, deps.compilation_context, header))
    own = cc_common.create_compilation_context(headers = depset(headers))
    return [
        DefaultInfo(files = depset(headers)),
        cc_common.merge_cc_infos(cc_infos = [CcInfo(compilation_context = own), deps]),
    ]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "src": attr.label(allow_single_file = True, mandatory = True),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
    },
    doc = """NAME.h, a copy of `src`, precompiled.

For sources with copts = ["-include", "PACKAGE/NAME.h"] that depend on this. GCC and clang take the precompiled one only
where its options are those of the source.""",
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
