#!/usr/bin/env python3
"""Tests of finding a Python with torch; installing is done by a fake."""
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import python_torch


class PythonTorchTest(unittest.TestCase):

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.environ = {"XDG_CACHE_HOME": str(self.folder)}
        self.environment = python_torch.cached_environment(self.environ)
        # The interpreter of this test may have torch or not.
        patch = mock.patch.object(sys, "executable", self.python("system", None))
        patch.start()
        self.addCleanup(patch.stop)
        self.logged = []

    def python(self, name, version):
        """A program that answers as a Python with that torch does, or without."""
        return self.script(self.folder / name, "exit 1" if version is None else f"echo {version}")

    @staticmethod
    def script(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def find(self, **kwargs):
        return python_torch.find(self.logged.append, self.environ, **kwargs)

    def test_the_chosen_one(self):
        self.environ["PEERS_PYTHON"] = self.python("mine", f"{python_torch.VERSION}+cu130")
        self.assertEqual(self.find(), self.environ["PEERS_PYTHON"])

    def test_a_chosen_one_that_will_not_do(self):
        for version, error in [(None, "cannot import torch"), ("1.0.0", "has torch 1.0.0")]:
            self.environ["PEERS_PYTHON"] = self.python("mine", version)
            with self.assertRaisesRegex(python_torch.NoTorch, error):
                self.find()
        self.environ["PEERS_PYTHON"] = str(self.folder / "none")
        with self.assertRaisesRegex(python_torch.NoTorch, "cannot import torch"):
            self.find()

    def test_this_python_then_that_of_the_cache(self):
        cached = self.script(self.environment / "bin/python", f"echo {python_torch.VERSION}")
        self.assertEqual(self.find(), cached)
        self.python("system", python_torch.VERSION)
        self.assertEqual(self.find(), sys.executable)

    def test_not_installing(self):
        with self.assertRaisesRegex(python_torch.NoTorch, "--no-install"):
            self.find(may_install=False)
        self.assertFalse(self.environment.exists())

    def test_installing_once(self):
        # As the venv module and pip: makes an environment whose Python has torch once pip has run.
        pip = f'case "$1" in -c) test -e "$0.torch" && echo {python_torch.VERSION};; -m) echo "$@" > "$0.torch";; esac'
        source = self.script(self.folder / "environments_python", pip)
        self.script(self.folder / "system", f'''
[ "$1" = -m ] || exit 1
mkdir -p "$4/bin" && cp {source} "$4/bin/python"''')
        self.assertEqual(self.find(), str(self.environment / "bin/python"))
        arguments = (self.environment / "bin/python.torch").read_text().split()
        self.assertEqual(arguments[:3], ["-m", "pip", "install"])
        self.assertEqual(arguments[-1], f"torch=={python_torch.VERSION}")
        self.assertIn("installing torch", self.logged[0])
        self.logged.clear()
        self.assertEqual(self.find(), str(self.environment / "bin/python"))
        self.assertEqual(self.logged, [])

    def test_an_environment_gets_what_it_lacks(self):
        python = self.script(self.environment / "bin/python", f'''
case "$1$2" in
  -m*) echo "$@" > "$0.installed" ;;
  *peft*) test -e "$0.installed" && echo {python_torch.VERSION} ;;
  *) echo {python_torch.VERSION} ;;
esac''')
        self.assertEqual(self.find(libraries=("peft",)), python)
        arguments = (self.environment / "bin/python.installed").read_text().split()
        self.assertEqual(arguments[-2:], ["peft", f"torch=={python_torch.VERSION}"])
        self.script(self.environment / "bin/python", f'case "$2" in *peft*) exit 1;; *) echo {python_torch.VERSION};; esac')
        with self.assertRaisesRegex(python_torch.NoTorch, "cannot import"):
            self.find(libraries=("peft",))

    def test_installing_fails(self):
        self.script(self.folder / "system", "exit 7")
        with self.assertRaisesRegex(python_torch.NoTorch, "failed with exit code 7.*PEERS_PYTHON"):
            self.find()

    def test_the_folder_of_the_cache(self):
        name = f"libtorch_fsdp/peers-torch-{python_torch.VERSION}"
        self.assertEqual(str(python_torch.cached_environment({"HOME": "/h"})), os.path.join("/h/.cache", name))
        self.assertEqual(str(python_torch.cached_environment({"HOME": "/h", "XDG_CACHE_HOME": "/c"})), f"/c/{name}")


if __name__ == "__main__":
    unittest.main()
