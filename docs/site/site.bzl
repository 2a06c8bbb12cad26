"""site: pages and public headers as a folder of HTML."""

load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

def _headers_of(target):
    if CcInfo in target:
        return target[CcInfo].compilation_context.direct_public_headers
    listed = target[OutputGroupInfo].public_headers if OutputGroupInfo in target else target.files
    return listed.to_list()

def _site_impl(ctx):
    folder = ctx.actions.declare_directory(ctx.label.name)
    files = ctx.files.srcs + [header for target in ctx.attr.headers for header in _headers_of(target)]
    arguments = ctx.actions.args()
    arguments.add(folder.path, format = "--output=%s")
    arguments.add_all(files)
    ctx.actions.run(
        executable = ctx.executable._make_site,
        arguments = [arguments],
        inputs = files,
        outputs = [folder],
        mnemonic = "Site",
        progress_message = "Documenting %s" % ctx.label,
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([folder]))]

site = rule(
    implementation = _site_impl,
    attrs = {
        "headers": attr.label_list(
            allow_files = True,
            doc = "headers, libraries that have them, and what lists its libraries' as public_headers",
        ),
        "srcs": attr.label_list(allow_files = True, doc = "all else that make_site.py takes"),
        "_make_site": attr.label(default = Label("//docs:make_site"), executable = True, cfg = "exec"),
    },
    doc = "A folder with index.html, made by Doxygen, which has to be on PATH.",
)
