#!/usr/bin/env python3
"""A Python that has torch: one that is there, or a virtual environment in the cache.

usage: python_torch.py    prints one that has torch and what else the checks with Python's libraries import (LIBRARIES)
"""
import contextlib
import fcntl
import os
import pathlib
import subprocess
import sys

VERSION = "2.11.0"
# The checks import these of Hugging Face beside torch.
LIBRARIES = ("safetensors", "tokenizers", "transformers", "peft")
INSTALL_SECONDS = 3600
PRINT_VERSION = "import torch, torch.distributed; print(torch.__version__)"


class NoTorch(Exception):
    """Why there is none and what to do."""


def cached_environment(environ=os.environ):
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/root", ".cache")
    return pathlib.Path(cache) / "libtorch_fsdp" / f"peers-torch-{VERSION}"


def torch_version(python, libraries=()):
    """The version of the torch that `python` imports, without what follows '+'; None where it lacks that or a library."""
    program = PRINT_VERSION + "".join(f"\nimport {library}" for library in libraries)
    try:
        done = subprocess.run([str(python), "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("+")[0] if done.returncode == 0 else None


def _run(command, log):
    """Shows what it prints on stderr: installing takes minutes."""
    log(f"$ {' '.join(map(str, command))}")
    try:
        done = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(),
                              timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoTorch(f"installing torch {VERSION}: {error}") from error
    if done.returncode != 0:
        raise NoTorch(f"installing torch {VERSION}: '{' '.join(map(str, command))}' failed with exit code "
                      f"{done.returncode}. On Debian the package python3-venv is needed, and pip needs an index that "
                      f"has torch {VERSION}. Or set PEERS_PYTHON to a Python that has it.")


def install(environment, log, libraries=()):
    """Makes `environment`, if it is not there, adds what it lacks and gives its Python."""
    environment.parent.mkdir(parents=True, exist_ok=True)
    python = environment / "bin" / "python"
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open(f"{environment}.lock", "w", encoding="utf-8"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        if torch_version(python, libraries) == VERSION:  # another run has just made it
            return str(python)
        if torch_version(python) != VERSION:
            log(f"installing torch {VERSION} into {environment}, once (minutes and gigabytes)")
            _run([sys.executable, "-m", "venv", "--clear", environment], log)
        _run([python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *libraries,
              f"torch=={VERSION}"], log)
    if torch_version(python, libraries) != VERSION:
        raise NoTorch(f"{python} cannot import {', '.join(('torch', *libraries))} although pip has installed them; see what "
                      f"'{python} -c \"import torch\"' says, or set PEERS_PYTHON to another Python")
    return str(python)


def find(log, environ=os.environ, may_install=True, libraries=()):
    """A Python with torch VERSION and `libraries`. Raises NoTorch."""
    chosen = environ.get("PEERS_PYTHON")
    if chosen:
        version = torch_version(chosen, libraries)
        if version is None:
            raise NoTorch(f"PEERS_PYTHON={chosen} cannot import {', '.join(('torch', *libraries))}; it has to be "
                          f"a Python that has torch {VERSION}")
        if version != VERSION:
            raise NoTorch(f"PEERS_PYTHON={chosen} has torch {version}; {VERSION} is what the C++ side is built with")
        return chosen
    environment = cached_environment(environ)
    for python in (sys.executable, str(environment / "bin" / "python")):
        if torch_version(python, libraries) == VERSION:
            return python
    if not may_install:
        raise NoTorch(f"neither {sys.executable} nor {environment} has torch {VERSION}, and --no-install is given")
    return install(environment, log, libraries)


def main():
    try:
        print(find(lambda line: print(line, file=sys.stderr), libraries=LIBRARIES))
    except NoTorch as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
