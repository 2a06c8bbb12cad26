"""source_archive: a third-party source release from its own host or from Debian."""

def _hand_help(rctx):
    return ("By hand: put {name} into a folder and build with --distdir=FOLDER. " +
            "Its sha256 is {sha256} ({urls}).").format(
        name = rctx.attr.urls[0].split("/")[-1],
        sha256 = rctx.attr.sha256,
        urls = ", ".join(rctx.attr.urls),
    )

def _from_debian(rctx):
    script = rctx.path(rctx.attr._debian_source)
    result = rctx.execute(
        ["python3", script, rctx.attr.debian_package, rctx.attr.debian_archive, "."],
        timeout = 600,
    )
    if result.return_code != 0:
        fail("{}: neither {} nor Debian's source package {} could be fetched.\n{}{}\n{}".format(
            rctx.name,
            rctx.attr.urls[0],
            rctx.attr.debian_package,
            result.stdout,
            result.stderr,
            _hand_help(rctx),
        ))
    digest = rctx.execute(["sha256sum", rctx.attr.debian_archive]).stdout.split(" ")[0]
    if digest != rctx.attr.debian_sha256:
        fail("{}: Debian's {} has sha256 {}, expected {}. {}".format(
            rctx.name,
            rctx.attr.debian_archive,
            digest,
            rctx.attr.debian_sha256,
            _hand_help(rctx),
        ))
    rctx.extract(rctx.attr.debian_archive, stripPrefix = rctx.attr.debian_strip_prefix)

def _source_archive_impl(rctx):
    name = rctx.attr.urls[0].split("/")[-1]
    download = rctx.download(
        url = rctx.attr.urls,
        output = name,
        sha256 = rctx.attr.sha256,
        allow_fail = True,
    )
    if download.success:
        rctx.extract(name, stripPrefix = rctx.attr.strip_prefix)
    else:
        _from_debian(rctx)

source_archive = repository_rule(
    implementation = _source_archive_impl,
    attrs = {
        "urls": attr.string_list(mandatory = True),
        "sha256": attr.string(mandatory = True),
        "strip_prefix": attr.string(),
        "debian_package": attr.string(mandatory = True),
        "debian_archive": attr.string(mandatory = True),
        "debian_sha256": attr.string(mandatory = True),
        "debian_strip_prefix": attr.string(),
        "_debian_source": attr.label(default = Label("//third_party/sources:debian_source.py")),
    },
    doc = "A source archive, checked by sha256, that is tried at `urls` first and " +
          "then as the upstream archive of a Debian source package.",
)
