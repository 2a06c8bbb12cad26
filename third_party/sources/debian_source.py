#!/usr/bin/env python3
"""Downloads the upstream archive of a Debian source package into a folder.

usage: debian_source.py PACKAGE ARCHIVE FOLDER

For machines that reach a Debian mirror but not the project's own host. Uses the
machine's apt sources with the suite replaced by bookworm and a private apt
state, so it needs no root and changes nothing on the machine.
"""
import glob
import os
import re
import subprocess
import sys
import tempfile

SUITE = "bookworm"


def deb822_entries(text):
    for stanza in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^([A-Za-z-]+):\s*(.*)$", stanza, re.M))
        if "deb" in fields.get("Types", "").split() and "URIs" in fields:
            yield fields["URIs"].split()[0], fields.get("Signed-By")


def one_line_entries(text):
    pattern = r"^deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+\S+"
    for options, uri in re.findall(pattern, text, re.M):
        key = re.search(r"signed-by=(\S+)", options)
        yield uri, key.group(1) if key else None


def mirror():
    """The machine's own Debian mirror and the key it is checked with."""
    entries = []
    for path in sorted(glob.glob("/etc/apt/sources.list.d/*.sources")):
        entries += deb822_entries(open(path).read())
    for path in ["/etc/apt/sources.list"] + sorted(glob.glob("/etc/apt/sources.list.d/*.list")):
        if os.path.exists(path):
            entries += one_line_entries(open(path).read())
    plain = [e for e in entries if e[0].rstrip("/").endswith("/debian")]
    if not plain:
        sys.exit("no Debian mirror in this machine's apt sources")
    return plain[0]


def main():
    package, archive, folder = sys.argv[1:]
    uri, key = mirror()
    with tempfile.TemporaryDirectory() as state:
        for name in ("lists/partial", "cache/archives/partial", "parts"):
            os.makedirs(os.path.join(state, name))
        with open(os.path.join(state, "parts/source.sources"), "w") as f:
            f.write(f"Types: deb-src\nURIs: {uri}\nSuites: {SUITE}\nComponents: main\n")
            if key:
                f.write(f"Signed-By: {key}\n")
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        options = [
            f"Dir::State::Lists={state}/lists",
            f"Dir::Cache={state}/cache",
            "Dir::Etc::SourceList=/dev/null",
            f"Dir::Etc::SourceParts={state}/parts",
            f"APT::Sandbox::User={user}",
            "Debug::NoLocking=1",
            "Acquire::Check-Valid-Until=false",
            "Acquire::Retries=3",
        ]
        apt = ["apt-get", "-qq"] + [word for o in options for word in ("-o", o)]
        subprocess.run(apt + ["update"], check=True)
        subprocess.run(apt + ["source", "--download-only", package], check=True, cwd=folder)
    if not os.path.exists(os.path.join(folder, archive)):
        sys.exit(f"Debian's source package {package} holds no {archive}")


if __name__ == "__main__":
    main()
