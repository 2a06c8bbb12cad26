#!/usr/bin/env python3
"""Finds the upstream archive of a Debian source package and prints its sha256.

Looks first among the files provided by hand, then asks apt with a state of its own: nothing of the machine's apt
configuration is changed, and no root is needed. The machine's own list says where packages come from.
"""

import argparse
import getpass
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile


def downloads_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "libtorch_fsdp", "downloads")


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def source_lists(suite):
    """The machine's Debian sources as deb-src stanzas of one suite, the archive's own first."""
    stanzas = []
    for path in glob.glob("/etc/apt/sources.list.d/*.sources"):
        with open(path, encoding="utf-8") as file:
            for stanza in re.split(r"\n\s*\n", file.read()):
                fields = dict(re.findall(r"^([\w-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
                stanzas.append((fields.get("URIs", ""), fields.get("Signed-By", "")))
    for path in ["/etc/apt/sources.list", *glob.glob("/etc/apt/sources.list.d/*.list")]:
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                for line in file:
                    match = re.match(r"\s*deb(?:-src)?\s+(?:\[(.*?)\]\s+)?(\S+)", line)
                    if match:
                        signed = re.search(r"signed-by=(\S+)", match.group(1) or "")
                        stanzas.append((match.group(2), signed.group(1) if signed else ""))
    result = []
    for uris, signed_by in stanzas:
        for uri in uris.split():
            # The security archive and other vendors' lists do not hold the suite.
            if re.search(r"debian/?$", uri):
                text = f"Types: deb-src\nURIs: {uri}\nSuites: {suite}\nComponents: main\n"
                keyring = signed_by or "/usr/share/keyrings/debian-archive-keyring.gpg"
                text += f"Signed-By: {keyring}\n"
                if text not in result:
                    result.append(text)
    return result


def apt_source(package, suite, folder):
    """Downloads the source package into `folder`; returns what apt said where that failed."""
    lists = source_lists(suite)
    if not lists:
        return "this machine has no Debian package source in /etc/apt"
    parts = os.path.join(folder, "parts")
    for name in ("parts", "lists/partial", "cache/archives/partial"):
        os.makedirs(os.path.join(folder, name))
    with open(os.path.join(parts, "debian.sources"), "w", encoding="utf-8") as file:
        file.write("\n".join(lists))
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # one without a name, as in a container
        user = "root"
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": parts,
        "Dir::State::lists": os.path.join(folder, "lists"),
        "Dir::Cache": os.path.join(folder, "cache"),
        "APT::Sandbox::User": user,
        "Debug::NoLocking": "1",
        "Acquire::Retries": "3",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "-qq"] + [f"-o{key}={value}" for key, value in options.items()]
    for arguments in (["update"], ["source", "--download-only", "--only-source", package]):
        done = subprocess.run(apt + arguments, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return ""
    # Where packages come from is the machine's affair: no addresses in messages.
    said = [re.sub(r"\w+://\S+|'[^' ]+\.[^' ]+'", "the package source", line) for line in done.stdout.splitlines()]
    return "; ".join(said[-3:]) or f"apt-get exited with {done.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", required=True)
    parser.add_argument("--suite", required=True)
    parser.add_argument("--sha256", action="append", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--by-hand", required=True, help="name of upstream's archive")
    args = parser.parse_args()

    tried = []
    given = downloads_folder()
    by_hand = [os.path.join(given, args.by_hand)] + sorted(glob.glob(os.path.join(given, args.package + "_*.orig.tar.gz")))
    with tempfile.TemporaryDirectory() as folder:
        for path in by_hand:
            if not os.path.exists(path):
                continue
            found = sha256_of(path)
            if found in args.sha256:
                shutil.copyfile(path, args.output)
                print(found)
                return 0
            tried.append(f"  {path} has the sha256 {found}")
        error = ""
        if shutil.which("apt-get"):
            error = apt_source(args.package, args.suite, folder)
            for path in glob.glob(os.path.join(folder, "*.orig.tar.*")):
                found = sha256_of(path)
                if found in args.sha256:
                    shutil.move(path, args.output)
                    print(found)
                    return 0
                error = f"{os.path.basename(path)} has the sha256 {found}"
        else:
            error = "apt-get is not on this machine"
        tried.append(f"  Debian's source package {args.package} ({args.suite}): {error}")
    print("\n".join(tried), file=sys.stderr)
    print(f"By hand: put {args.by_hand} into {given}; accepted sha256: {' or '.join(args.sha256)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
