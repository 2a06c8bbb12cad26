"""Repositories that consist of links, made by a program."""

def fill(rctx, arguments):
    """Runs the program of the attribute `_script` in the new repository and puts `build_file` beside what it made."""
    rctx.path(rctx.attr._wheels)  # imported: a change fills the repository anew
    result = rctx.execute(
        ["python3", rctx.path(rctx.attr._script), "--output=" + str(rctx.path("."))] + arguments,
        # No __pycache__ among the sources.
        environment = {"PYTHONDONTWRITEBYTECODE": "1"},
        timeout = 3600,
    )
    if result.return_code != 0:
        fail("@{}: {}".format(rctx.name, result.stderr.strip() or "python3 could not be started"))
    # No link: an output base may outlive the workspace that the label is in.
    rctx.file("BUILD.bazel", rctx.read(rctx.attr.build_file), executable = False)
