"""script_binary and script_test: one executable file, in any language that its first line names.

Bazel 9 has no sh_test of its own; these need nothing but Bazel.
"""

def _impl(ctx):
    executable = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.symlink(output = executable, target_file = ctx.file.src, is_executable = True)
    runfiles = ctx.runfiles(files = [ctx.file.src] + ctx.files.data)
    for target in ctx.attr.data:
        runfiles = runfiles.merge(target[DefaultInfo].default_runfiles)
    return [DefaultInfo(executable = executable, runfiles = runfiles)]

_ATTRIBUTES = {
    "src": attr.label(allow_single_file = True, mandatory = True),
    "data": attr.label_list(allow_files = True),
}

script_binary = rule(implementation = _impl, attrs = _ATTRIBUTES, executable = True)

script_test = rule(implementation = _impl, attrs = _ATTRIBUTES, test = True)
