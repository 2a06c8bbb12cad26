"""Pinned wheels, checked by sha256 and kept unpacked under ${XDG_CACHE_HOME:-~/.cache}/libtorch_fsdp.

PyTorch and NVIDIA publish their C++ libraries and tools to package registries as Python packages.
"""

import fcntl
import glob
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

# The wheels name different versions of the C library in their platform tags.
PLATFORMS = [f"manylinux_2_{minor}" for minor in (12, 17, 18, 24, 25, 26, 27, 28)]


class Failure(Exception):
    """Says what was tried, why it did not work, and what to do."""


class PinnedTree:
    """The wanted files of some wheels in one folder.

    wheels: "name==version" -> kind of processor -> sha256. target_of: a wheel's member -> its path in the folder, or
    None to leave it out. required: files that the folder has. key: what distinguishes this choice of files from others
    of the same wheels. variable: the environment variable that names an installed folder instead; layout: what is in
    there. machine: the kind of processor, as `uname -m` says it.
    """

    def __init__(self, name, wheels, target_of, required, key, variable, layout, machine=platform.machine()):
        if sys.platform != "linux" or any(machine not in sums for sums in wheels.values()):
            raise Failure(f"there is no pinned {name} for {sys.platform} {machine}: "
                          f"set {variable}=DIR to an installed one ({layout})")
        self.name = name
        self.machine = machine
        self.wheels = {name: sums[machine] for name, sums in wheels.items()}
        self.target_of = target_of
        self.required = required
        self.key = hashlib.sha256(repr([sorted(self.wheels.items()), key]).encode()).hexdigest()[:16]
        self.variable = variable
        self.layout = layout

    def path(self):
        """The folder; downloads the wheels the first time."""
        cache = cache_folder()
        tree = os.path.join(cache, f"{self.name}-{self.key}")
        if os.path.isdir(tree):
            return tree
        downloads = os.path.join(cache, "downloads")
        os.makedirs(downloads, exist_ok=True)
        # Two builds may come here at once: one downloads, the other waits and finds the tree.
        with open(os.path.join(cache, "lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.isdir(tree):
                with tempfile.TemporaryDirectory(dir=cache) as folder:
                    new = os.path.join(folder, "tree")
                    for wheel in self._download(folder, downloads):
                        self._unpack(wheel, new)
                    missing = [name for name in self.required if not os.path.exists(os.path.join(new, name))]
                    if missing:
                        raise Failure("the wheels lack " + ", ".join(missing))
                    os.rename(new, tree)
        return tree

    def _by_hand(self, downloads):
        lines = ["By hand, either", f"  set {self.variable}=DIR to an installed one ({self.layout}), or",
                 f"  put these wheels into {downloads}:"]
        return "\n".join(lines + [f"    {name} (cp311 or py3, {self.machine}): sha256 {sha256}"
                                  for name, sha256 in self.wheels.items()])

    def _download(self, folder, downloads):
        """Returns the paths of the wheels, checked against their sha256: pip refuses any other file."""
        requirements = os.path.join(folder, "requirements.txt")
        with open(requirements, "w", encoding="utf-8") as file:
            for name, sha256 in self.wheels.items():
                file.write(f"{name} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
                   "--require-hashes", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--python-version=311",
                   "--find-links", downloads, "--dest", folder, "--requirement", requirements]
        command += [f"--platform={name}_{self.machine}" for name in PLATFORMS]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
        if done.returncode != 0:
            if "No module named pip" in done.stdout:
                raise Failure("python3 has no pip. On Debian:  apt-get install python3-pip\n" + self._by_hand(downloads))
            # Where packages come from is the machine's affair: no addresses in messages.
            said = [re.sub(r"\w+://\S+|host='[^']*'", "the registry", line) for line in done.stdout.splitlines()
                    if line.startswith("ERROR:")]
            raise Failure(f"downloading {', '.join(self.wheels)} with pip failed:\n  " + "\n  ".join(said[-4:]) + "\n" +
                          self._by_hand(downloads))
        return glob.glob(os.path.join(folder, "*.whl"))

    def _unpack(self, wheel, tree):
        """Takes the wanted files and the licences out of a wheel."""
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = member.filename
                if ".dist-info/licenses/" in name:
                    target = os.path.join("licenses", name.replace(".dist-info/licenses", ""))
                else:
                    target = self.target_of(name)
                if target is None or name.endswith("/"):
                    continue
                target = os.path.join(tree, target)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with archive.open(member) as source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                is_program = (member.external_attr >> 16) & 0o100
                if is_program or ".so" in os.path.basename(name):
                    os.chmod(target, 0o755)


def cache_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "libtorch_fsdp")


def link_all(output, links):
    """Symbolic links in the folder `output`: relative path -> what it points to."""
    for name, path in links.items():
        place = os.path.join(output, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.symlink(path, place)


def run(main):
    """The exit code of a program; a Failure becomes its text."""
    try:
        main()
    except (Failure, OSError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
