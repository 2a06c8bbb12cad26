"""Tests of tools/release in a small repository, with a script in the place of Bazel."""

import base64
import contextlib
import gzip
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import tarfile
import tempfile
import unittest
from unittest import mock

_PATH = os.path.join(os.path.dirname(os.path.realpath(__file__)), "release")
_LOADER = importlib.machinery.SourceFileLoader("release", _PATH)
release = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", _LOADER))
_LOADER.exec_module(release)

URL = "https://host.example/v1.2.0"
TREE = {
    "MODULE.bazel": 'module(\n    name = "libtorch_fsdp",\n    version = "1.2.0",\n)\n',
    "docs/guide/first_hour.md": 'bazel_dep(name = "libtorch_fsdp", version = "1.2.0")\n',
    "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2026-12-01)\n\n### Added\n\n- It is new.\n\n"
                    "## 1.1.0 (2026-11-01)\n\n- It is old.\n",
    # Packs what it was asked for.
    "bazelw": """#!/bin/sh
bin=$PWD.bin
[ "$1" != info ] || { echo "$bin"; exit; }
echo "Description: for LibTorch 2.11, by $*" >libtorch_fsdp.pc
mkdir -p "$bin/package"
tar -czf "$bin/package/install.tar.gz" --transform=s,^,lib/pkgconfig/, libtorch_fsdp.pc
rm libtorch_fsdp.pc
rm -rf "$bin/package/wheel"
mkdir "$bin/package/wheel"
echo "$*" >"$bin/package/wheel/libtorch_fsdp-1.2.0$(echo "$*" | sed -n s/.*config=cuda.*/+cu13/p)-any.whl"
""",
}


class ReleaseTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.root = self.folder / "tree"
        identity = {f"GIT_{role}_{what}": "x" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        for patch in (mock.patch.object(release, "ROOT", self.root),
                      mock.patch.dict(os.environ, {**identity, "CUDA_HOME": str(self.folder / "cuda")})):
            patch.start()
            self.addCleanup(patch.stop)
        for path, text in TREE.items():
            self.write(path, text)
        (self.root / "bazelw").chmod(0o755)
        self.git("init", "-q", "-b", "main")
        self.commit()

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, encoding="utf-8")

    def git(self, *arguments):
        subprocess.run(["git", *arguments], cwd=self.root, check=True)

    def commit(self):
        self.git("add", ".")
        self.git("commit", "-q", "-m", "x")

    def run_release(self, *arguments):
        """What it prints; SystemExit where it refuses."""
        out = io.StringIO()
        with mock.patch.object(release.sys, "argv", ["release", *arguments]), contextlib.redirect_stdout(out):
            release.main()
        return out.getvalue()

    def make(self, name="out"):
        return self.run_release(URL + "/", str(self.folder / name)), self.folder / name

    def assert_refused(self, text, *arguments):
        with self.assertRaises(SystemExit) as caught:
            self.run_release(*(arguments or (URL, str(self.folder / "refused"))))
        self.assertIn(text, str(caught.exception))
        self.assertFalse((self.folder / "refused").exists())

    def test_one_version_everywhere(self):
        self.run_release("--check")
        for path in ("MODULE.bazel", "docs/guide/first_hour.md"):
            self.write(path, TREE[path].replace("1.2.0", "1.3.0"))
            self.assert_refused(f"{path} has the version 1.3.0, and the newest entry of CHANGELOG.md is of 1.2.0",
                                "--check")
            self.write(path, "\n")
            self.assert_refused(f"{path} has the version nowhere", "--check")
            self.write(path, TREE[path])

    def test_the_newest_entry_says_when(self):
        unreleased = TREE["CHANGELOG.md"].replace("2026-12-01", "unreleased")
        self.write("CHANGELOG.md", unreleased)
        self.run_release("--check")
        self.assert_refused("1.2.0 is unreleased: give the entry its date")
        for title in ("1.2.0", "Soon (2026)", "1.3.0 (2026-13-45)"):
            self.write("CHANGELOG.md", f"# Changelog\n\n## {title}\n" + TREE["CHANGELOG.md"])
            self.assert_refused('the newest entry has to begin with "## VERSION (unreleased)"', "--check")

    def test_only_a_clean_tree_on_main(self):
        self.write("new.txt", "")
        self.assert_refused("commit or remove\n?? new.txt")
        self.git("switch", "-q", "-c", "other")
        self.assert_refused("the branch is other: a release is made of main")

    def test_a_tag_stays_where_it_is(self):
        self.git("tag", "-a", "v1.2.0", "-m", "x")
        self.make()
        self.write("new.txt", "")
        self.commit()
        self.assert_refused("there is a tag v1.2.0 of another commit")

    def test_files_and_their_sums(self):
        printed, out = self.make()
        machine = os.uname().machine
        names = ["libtorch_fsdp-1.2.0.tar.gz", f"libtorch_fsdp-1.2.0-cpu-{machine}.tar.gz",
                 "libtorch_fsdp-1.2.0-any.whl"]
        self.assertEqual({path.name for path in out.iterdir()}, {*names, "SHA256SUMS", "notes.md"})
        self.assertIn("no package for CUDA", printed)
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=out, check=True)
        self.assertEqual(re.findall(r"  (.*)", (out / "SHA256SUMS").read_text()), names)
        with tarfile.open(out / names[0]) as tar:
            self.assertEqual({info.name for info in tar if info.isfile()},
                             {f"libtorch_fsdp-1.2.0/{path}" for path in TREE})
        with tarfile.open(out / names[1]) as tar:
            self.assertIn(b"by test --config=opt //package:install_test\n",
                          tar.extractfile("lib/pkgconfig/libtorch_fsdp.pc").read())

    def test_with_a_toolkit_for_cuda_too(self):
        nvcc = self.folder / "cuda/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch(0o755)
        _, out = self.make()
        package = f"libtorch_fsdp-1.2.0-cuda-{os.uname().machine}.tar.gz"
        self.assertIn(b"by test --config=opt --config=cuda //", gzip.decompress((out / package).read_bytes()))
        for name in (package, "libtorch_fsdp-1.2.0+cu13-any.whl"):
            self.assertIn(name, (out / "SHA256SUMS").read_text())
            self.assertIn(name, (out / "notes.md").read_text())

    def test_the_same_commit_gives_the_same_source(self):
        _, first = self.make("first")
        self.git("config", "tar.umask", "0077")
        self.git("config", "core.autocrlf", "true")
        _, second = self.make("second")
        name = "libtorch_fsdp-1.2.0.tar.gz"
        self.assertEqual((first / name).read_bytes(), (second / name).read_bytes())
        self.assertEqual((first / name).read_bytes()[4:8], bytes(4), "the time in gzip's header")

    def test_notes_name_the_source_as_bazel_checks_it(self):
        printed, out = self.make()
        notes = (out / "notes.md").read_text()
        self.assertTrue(notes.startswith("### Added\n\n- It is new.\n\n### "))
        self.assertNotIn("It is old", notes)
        digest = hashlib.sha256((out / "libtorch_fsdp-1.2.0.tar.gz").read_bytes())
        for text in (f'sha256 = "{digest.hexdigest()}"',
                     f'integrity = "sha256-{base64.b64encode(digest.digest()).decode()}"',
                     f'urls = ["{URL}/libtorch_fsdp-1.2.0.tar.gz"]', 'strip_prefix = "libtorch_fsdp-1.2.0"',
                     "needs LibTorch 2.11, and"):
            self.assertIn(text, notes)
            self.assertIn(text, printed)
        commit = release.git("rev-parse", "HEAD").decode()
        self.assertIn(f"git tag -a v1.2.0 -m 'libtorch_fsdp 1.2.0' {commit}", printed)

    def test_a_package_whose_test_fails(self):
        self.write("bazelw", "#!/bin/sh\nexit 3\n")
        self.commit()
        with self.assertRaises(SystemExit) as caught:
            self.make()
        self.assertIn("bazelw test --config=opt //package:install_test' failed with exit code 3", str(caught.exception))
        with self.assertRaisesRegex(SystemExit, "out is there already"):
            self.make()


if __name__ == "__main__":
    unittest.main()
