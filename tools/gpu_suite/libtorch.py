"""Finds an installed LibTorch for CUDA and the folders that programs linked to it need."""
import pathlib
import re
import subprocess

VERSION = "2.11.0"
CUDA = "13"
PRINT_FOLDER = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"


class NoLibTorch(Exception):
    """Why there is none and what to do."""


def folder_of(python):
    """Where the torch that `python` would import is."""
    try:
        done = subprocess.run([python, "-c", PRINT_FOLDER], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibTorch(f"asking {python} for torch: {error}. Name LibTorch's folder: --libtorch DIR") from error
    if done.returncode != 0:
        raise NoLibTorch(f"{python} has no torch. Pass --python PROGRAM for one that has torch {VERSION} for CUDA, or "
                         "--libtorch DIR, the folder with lib/libtorch_cuda.so")
    return pathlib.Path(done.stdout.strip())


def version_of(folder):
    """As in "2.11.0+cu130", of a wheel's folder or of an unpacked archive."""
    wheel, archive = folder / "version.py", folder / "build-version"
    if wheel.exists():
        found = re.search(r"^__version__ = '([^']+)'", wheel.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found.group(1)
    if archive.exists():
        return archive.read_text(encoding="utf-8").strip()
    raise NoLibTorch(f"{folder} has neither version.py nor build-version: this is not LibTorch's folder")


def check(folder):
    """The version; raises NoLibTorch where the programs do not fit to what is in `folder`."""
    library = folder / "lib" / "libtorch_cuda.so"
    if not library.exists():
        raise NoLibTorch(f"{library} does not exist; this LibTorch is not for CUDA. Install torch {VERSION} for CUDA, "
                         "or name another folder: --libtorch DIR")
    version = version_of(folder)
    if version.split("+")[0] != VERSION:
        raise NoLibTorch(f"{folder} has LibTorch {version}; the programs were linked with {VERSION}, and no other "
                         "version has the same interfaces")
    built_for = re.search(r"\+cu(\d\d)", version)
    if built_for and built_for.group(1) != CUDA:
        raise NoLibTorch(f"{folder} has LibTorch {version}, whose CUDA is {built_for.group(1)}; this needs one for CUDA "
                         f"{CUDA}, such as {VERSION}+cu{CUDA}0")
    return version


def library_folders(folder):
    """For LD_LIBRARY_PATH: its own, and those of NVIDIA's packages that pip installs beside it."""
    return [str(folder / "lib")] + sorted(str(path) for path in folder.parent.glob("nvidia/*/lib"))
