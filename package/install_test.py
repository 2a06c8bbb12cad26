#!/usr/bin/env python3
"""Looks into the folder and the wheel that //package packs. tools/checks/cmake has what takes a LibTorch beside them."""

import base64
import glob
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import tarfile
import tempfile
import unittest
import zipfile

import lay_out

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = "lib/liblibtorch_fsdp.so.0.1"
# What libtorch_cuda needs is found by it alone.
NEEDED = r"lib(torch(_cpu|_cuda)?|c10|stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so(\.\d+)*|ld-linux-.*"
PROGRAMS = ["fsdp-generate", "fsdp-train"]
# Of C; or mangled: a function, a variable, a table of a class, a thunk, or a static variable, in one of the two namespaces.
# That of Abseil names its release, so that a program may have another one besides.
EXPORTED = r"fsdp_[a-z_]+$|AbslInternal\w+_lts_\d{8}$|_Z(T[VTSI]|T[hvc].*_|GV|GVZ|Z)?NK?(4fsdp|4absl12lts_\d{8})"


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
            text = read(f"{self.root}/include/{header}")
            # By a relative path, whatever else a program has under that name.
            for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M):
                self.assertIn(os.path.normpath(os.path.join(os.path.dirname(header), included)), headers, header)
            for included in re.findall(r"^\s*#\s*include\s+<([^>]+)>", text, re.M):
                self.assertNotIn(included.split("/")[0], folders, f"which {header} includes")
            if not header.startswith("absl/"):
                self.assertRegex(text, r"#ifndef LIBTORCH_FSDP_(\w+)\n#define LIBTORCH_FSDP_\1\n")

    def test_libraries_are_looked_for_where_pip_puts_torch(self):
        dynamic = self.output_of("readelf", "-dW")
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        self.assertLess({"libtorch_cpu.so", "libc10.so"}, set(needed))
        self.assertEqual([], [name for name in needed if not re.fullmatch(NEEDED, name)])
        self.assertNotRegex(dynamic, r"\((RPATH|TEXTREL)\)")
        self.assertRegex(dynamic, r"\(RUNPATH\).*\[\$ORIGIN/../../torch/lib(:\$ORIGIN/../../nvidia/\w+/lib)*\]")
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
        self.assertEqual(4, len(texts))
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


class WheelTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        path, = glob.glob(os.path.join(HERE, "wheel", "*.whl"))
        self.name, self.tag = os.path.basename(path)[:-len(".whl")].split("-py3-")
        self.info = f"{self.name}.dist-info"
        with zipfile.ZipFile(path) as wheel:
            self.entries = {entry.filename: entry for entry in wheel.infolist()}
            self.files = {name: wheel.read(name) for name in self.entries}

    def headers(self, name):
        return re.findall("^([^:]+): (.*)$", self.files[f"{self.info}/{name}"].decode(), re.M)

    def test_has_the_files_of_the_folder_and_programs_and_no_python(self):
        with tarfile.open(os.path.join(HERE, "install.tar.gz")) as tar:
            folder = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
        licenses = "share/licenses/libtorch_fsdp"
        expected = {f"libtorch_fsdp/{path}".replace(f"libtorch_fsdp/{licenses}", f"{self.info}/licenses"): text
                    for path, text in folder.items()}
        self.assertEqual(expected, {path: self.files.get(path) for path in expected})
        self.assertEqual({"libtorch_fsdp/lib/liblibtorch_fsdp.so"} | {f"{self.info}/{name}" for name in
                                                                      ("METADATA", "WHEEL", "RECORD")} |
                         {f"{folder}/{name}" for name in PROGRAMS for folder in
                          ("libtorch_fsdp/bin", f"{self.name}.data/scripts")}, set(self.files) - set(expected))
        self.assertEqual([], [path for path in self.files if path.endswith(".py")])
        self.assertEqual({(1980, 1, 1, 0, 0, 0)}, {entry.date_time for entry in self.entries.values()})

    def test_records_every_file(self):
        record = f"{self.info}/RECORD"
        lines = [f"{record},,"]
        for path in set(self.files) - {record}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(self.files[path]).digest()).decode().rstrip("=")
            lines.append(f"{path},sha256={digest},{len(self.files[path])}")
        self.assertEqual(sorted(lines), sorted(self.files[record].decode().splitlines()))

    def test_says_what_it_is_and_needs(self):
        metadata = self.headers("METADATA")
        module = re.search(r'^    version = "(.*)"', read(os.path.join(HERE, "../MODULE.bazel")), re.M)[1]
        self.assertIn(("Version", self.name.split("-")[1]), metadata)
        self.assertRegex(self.name, rf"^libtorch_fsdp-{re.escape(module)}(\+cu\d+)?$")
        pc = self.files["libtorch_fsdp/lib/pkgconfig/libtorch_fsdp.pc"].decode()
        torch = re.search(r"LibTorch (\d+\.\d+)", pc)[1]
        self.assertIn(("Requires-Dist", f"torch ~= {torch}.0"), metadata)
        self.assertIn(("License-Expression", "Apache-2.0 AND BSD-3-Clause AND MIT AND Zlib"), metadata)
        self.assertEqual({f"{self.info}/licenses/{text}" for key, text in metadata if key == "License-File"},
                         {path for path in self.files if "/licenses/" in path})
        self.assertIn(("Tag", f"py3-{self.tag}"), self.headers("WHEEL"))

    def test_programs_and_library_run_on_what_the_tag_says(self):
        glibc = int(re.fullmatch(rf"none-manylinux_2_(\d+)_{platform.machine()}", self.tag)[1])
        self.assertLessEqual(glibc, int(platform.libc_ver()[1].split(".")[1]), "it was built here")
        for path in [f"libtorch_fsdp/{LIBRARY}", *(f"libtorch_fsdp/bin/{name}" for name in PROGRAMS)]:
            (self.root / "elf").write_bytes(self.files[path])
            said = subprocess.check_output(["readelf", "-dVW", self.root / "elf"], text=True)
            self.assertLessEqual(max(map(int, re.findall(r"Name: GLIBC_2\.(\d+)", said))), glibc, path)
            self.assertTrue(self.entries[path].external_attr >> 16 & 0o100, path)
            if "/bin/" in path:
                self.assertIn(f"[{os.path.basename(LIBRARY)}]", said)
                self.assertRegex(said, r"\(RUNPATH\).*\[\$ORIGIN/../../torch/lib:.*\$ORIGIN/../lib\]")

    def test_the_system_is_the_oldest_that_has_all_symbols(self):
        for symbols, glibc in (("GLIBC_2.2.5 GLIBCXX_3.4.21 CXXABI_1.3", 28), ("GLIBC_2.34 GLIBCXX_3.4.9", 34),
                               ("GLIBC_2.17 GLIBCXX_3.4.30", 35), ("GLIBC_2.17 CXXABI_1.3.15", 39),
                               ("GLIBC_2.40 GLIBCXX_3.4.30", 40), ("GLIBC_2.4 GLIBC_ABI_DT_RELR", 36)):
            lines = "".join(f"  0x0010:   Name: {symbol}  Flags: none\n" for symbol in symbols.split())
            self.assertEqual(f"py3-none-manylinux_2_{glibc}_{platform.machine()}", lay_out.system_of(lines), symbols)
        with self.assertRaisesRegex(SystemExit, "SYSTEMS has GLIBCXX_3.4.99"):
            lay_out.system_of("Name: GLIBCXX_3.4.99")

    def test_scripts_find_the_program_that_has_a_torch_beside_it(self):
        script = self.root / "bin/fsdp-train"
        script.parent.mkdir()
        script.write_bytes(self.files[f"{self.name}.data/scripts/fsdp-train"])
        script.chmod(0o755)
        (self.root / "elsewhere").symlink_to(script)

        def install(packages):
            program = self.root / packages / "libtorch_fsdp/bin/fsdp-train"
            program.parent.mkdir(parents=True)
            program.write_text(f'#!/bin/sh\necho {packages} "$#" "$@"\n')
            program.chmod(0o755)

        def run():
            return subprocess.run([self.root / "elsewhere", "--a", "b c"], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, check=False).stdout
        python = "lib/python3.11/site-packages"
        install(python)
        self.assertIn(f"LD_LIBRARY_PATH=.../torch/lib {self.root}/bin/../{python}/libtorch_fsdp/bin/fsdp-train", run())
        # Of pip install --target.
        install(".")
        (self.root / "torch/lib").mkdir(parents=True)
        self.assertEqual(". 2 --a b c\n", run())
        # The first has a torch alone.
        for version in ("3.10", "3.11"):
            (self.root / f"lib/python{version}/site-packages/torch/lib").mkdir(parents=True)
        self.assertEqual(f"{python} 2 --a b c\n", run())


if __name__ == "__main__":
    unittest.main()
