"""Runs clang-tidy on every C++ source of our own targets; see --config=strict."""

load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

def _sources(ctx):
    files = []
    for target in getattr(ctx.rule.attr, "srcs", []):
        files += [f for f in target.files.to_list() if f.is_source and f.extension == "cc"]
    return files

def _clang_tidy_aspect_impl(target, ctx):
    if CcInfo not in target or target.label.workspace_name:
        return []
    context = target[CcInfo].compilation_context
    flags = ["-std=c++17", "-Wall", "-Wextra"]
    flags += ["-D" + define for define in context.defines.to_list() + context.local_defines.to_list()]
    flags += ["-I" + path for path in context.includes.to_list()]
    for path in context.quote_includes.to_list():
        # Only our own headers are judged.
        flags += ["-isystem" if "external/" in path else "-iquote", path]
    for path in context.system_includes.to_list():
        flags += ["-isystem", path]
    results = []
    for source in _sources(ctx):
        result = ctx.actions.declare_file("{}.{}.clang_tidy".format(target.label.name, source.basename))
        ctx.actions.run_shell(
            inputs = depset([source, ctx.file._config], transitive = [context.headers]),
            outputs = [result],
            arguments = [result.path, source.path] + flags,
            command = """
out=$1 source=$2; shift 2
command -v clang-tidy >/dev/null || { echo "clang-tidy is not installed (Debian: apt-get install clang-tidy)"; exit 1; }
clang-tidy --quiet "$source" -- "$@" >"$out" 2>&1 || { cat "$out"; exit 1; }
""",
            mnemonic = "ClangTidy",
            progress_message = "clang-tidy " + source.short_path,
            use_default_shell_env = True,
        )
        results.append(result)
    return [OutputGroupInfo(clang_tidy = depset(results))]

clang_tidy_aspect = aspect(
    implementation = _clang_tidy_aspect_impl,
    attrs = {
        "_config": attr.label(default = Label("//:.clang-tidy"), allow_single_file = True),
    },
)
