"""Source archives that come from upstream or, where that is out of reach, from Debian's source packages."""

def _source_archive_impl(rctx):
    wanted = dict(rctx.attr.strip_prefixes)
    archive = "archive.tar.gz"
    strip_prefix = wanted.get(rctx.attr.sha256)
    result = rctx.download(
        url = rctx.attr.urls,
        output = archive,
        sha256 = rctx.attr.sha256,
        allow_fail = True,
    )
    if not result.success:
        rctx.report_progress("taking {} from Debian's source packages".format(rctx.attr.debian_package))
        result = rctx.execute(
            [
                "python3",
                rctx.path(rctx.attr._debian_source),
                "--package=" + rctx.attr.debian_package,
                "--suite=" + rctx.attr.debian_suite,
                "--output=" + str(rctx.path(archive)),
                "--by-hand=" + rctx.attr.urls[0].split("/")[-1],
            ] + ["--sha256=" + sha256 for sha256 in wanted],
            timeout = 1200,
        )
        if result.return_code != 0:
            # What was tried, and how to do it by hand.
            fail("\n".join([
                "@{}: no source archive. Tried:".format(rctx.name),
            ] + [
                "  " + url
                for url in rctx.attr.urls
            ] + [
                result.stderr.strip() or "  python3 could not be started",
            ]))
        strip_prefix = wanted[result.stdout.strip()]
    rctx.extract(archive, stripPrefix = strip_prefix)
    rctx.delete(archive)
    if rctx.attr.build_file:
        # No link: an output base may outlive the workspace that the label is in.
        rctx.file("BUILD.bazel", rctx.read(rctx.attr.build_file), executable = False)

source_archive = repository_rule(
    implementation = _source_archive_impl,
    doc = "An archive known by several sha256: upstream's, and the one of Debian's package of the same release.",
    attrs = {
        "build_file": attr.label(doc = "for sources that bring none"),
        "debian_package": attr.string(mandatory = True),
        "debian_suite": attr.string(default = "bookworm"),
        "sha256": attr.string(mandatory = True, doc = "of the file behind `urls`"),
        "strip_prefixes": attr.string_dict(mandatory = True, doc = "sha256 of an archive -> its top folder"),
        "urls": attr.string_list(mandatory = True),
        "_debian_source": attr.label(default = Label("//third_party/repositories:debian_source.py")),
    },
)
