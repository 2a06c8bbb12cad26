#!/usr/bin/env python3
"""Looks into the folder that //package:install packs. What takes CMake and a LibTorch beside it is in tools/checks/cmake."""

import os
import re
import subprocess
import tarfile
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = "lib/liblibtorch_fsdp.so.0.1"
# libgomp, which LibTorch brings along, where g++ has compiled.
NEEDED = (r"lib(torch(_cpu|_cuda)?|c10(_cuda)?|stdc\+\+|m|gcc_s|gomp|c|pthread|dl|rt|nccl|cudart)\.so(\.\d+)*|"
          r"ld-linux-.*")
# Of C; or mangled: a function, a variable, a table of a class, a thunk, or a static variable, in one of the two namespaces.
EXPORTED = r"fsdp_[a-z_]+$|_Z(T[VTSI]|T[hvc].*_|GV|GVZ|Z)?NK?(4fsdp|4absl)"


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


class InstallTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.root = scratch.name
        with tarfile.open(os.path.join(HERE, "install.tar.gz")) as tar:
            tar.extractall(cls.root)
        cls.files = {os.path.relpath(os.path.join(folder, name), cls.root)
                     for folder, _, names in os.walk(cls.root) for name in names}

    def output_of(self, *command):
        return subprocess.check_output([*command, os.path.join(self.root, LIBRARY)], text=True)

    def test_has_what_headers_include(self):
        headers = {path[len("include/"):] for path in self.files if path.startswith("include/")}
        self.assertIn("fsdp/fully_sharded_data_parallel.h", headers)
        folders = {header.split("/")[0] for header in headers}
        for header in headers:
            for included in re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', read(f"{self.root}/include/{header}"), re.M):
                if included.split("/")[0] in folders:
                    self.assertIn(included, headers, f"which {header} includes")

    def test_libraries_are_named_and_not_their_folders(self):
        dynamic = self.output_of("readelf", "-dW")
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        self.assertLess({"libtorch_cpu.so", "libc10.so"}, set(needed))
        self.assertEqual([], [name for name in needed if not re.fullmatch(NEEDED, name)])
        self.assertNotRegex(dynamic, r"\((RPATH|RUNPATH|TEXTREL)\)")
        self.assertIn(f"[{os.path.basename(LIBRARY)}]", re.search(r"\(SONAME\).*", dynamic)[0])
        self.assertEqual(os.path.basename(LIBRARY), os.readlink(f"{self.root}/lib/liblibtorch_fsdp.so"))

    def test_exports_its_namespaces_only(self):
        names = [line.split()[-1] for line in self.output_of("nm", "-D", "--defined-only").splitlines()]
        self.assertTrue(any(name.startswith("_ZN4fsdp4comm8RunRanks") for name in names))
        header = read(f"{self.root}/include/capi/libtorch_fsdp.h")
        self.assertEqual(set(re.findall(r"^\w[\w *]*?\*? ?(fsdp_\w+)\(", header, re.M)),
                         {name for name in names if name.startswith("fsdp_")})
        self.assertEqual([], [name for name in names if not re.match(EXPORTED, name)])

    def test_templates_are_filled_with_the_version_of_the_module(self):
        texts = {path: read(f"{self.root}/{path}") for path in self.files if path.endswith((".cmake", ".pc"))}
        self.assertEqual(3, len(texts))
        for path, text in texts.items():
            self.assertNotRegex(text, "@[A-Z]+@", path)
        version = re.search(r'^    version = "(.*)"', read(os.path.join(HERE, "../MODULE.bazel")), re.M)[1]
        self.assertIn(f"Version: {version}\n", texts["lib/pkgconfig/libtorch_fsdp.pc"])
        self.assertIn(f'VERSION "{version}"\n', read(f"{self.root}/include/capi/libtorch_fsdp.h"))
        self.assertTrue(version.startswith(LIBRARY.split(".so.")[1] + "."), "before 1.0 the API is the minor version's")

    def test_every_license_has_its_text(self):
        folder = "share/licenses/libtorch_fsdp"
        names = re.findall(r"^([\w-]+): \S", read(f"{self.root}/{folder}/SPDX"), re.M)
        self.assertEqual({f"{folder}/{name}" for name in [*names, "SPDX"]},
                         {path for path in self.files if path.startswith(folder)})


if __name__ == "__main__":
    unittest.main()
