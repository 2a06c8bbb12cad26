#!/usr/bin/env python3
"""Tests of what is said about the machine."""
import os
import pathlib
import platform
import tempfile
import unittest

import machine


class MachineTest(unittest.TestCase):

    def test_model_of_the_processor(self):
        self.assertEqual(machine.cpu_model("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\nflags\t: a\n"),
                         "Some CPU @ 2 GHz")
        self.assertEqual(machine.cpu_model("processor\t: 0\n"), platform.machine())

    def test_compiler_that_a_program_names(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program")
            for noted, said in [(b"GCC: (Debian 12.2.0-14+deb12u1) 12.2.0", "g++ 12.2.0"),
                                (b"clang version 16.0.6 (x)", "clang version 16.0.6"), (b"", "")]:
                program.write_bytes(b"\x7fELF\0\xff" + noted + b"\0rest")
                self.assertEqual(machine.compiler(program), said)
            self.assertEqual(machine.compiler(program / "none"), "")

    def test_sentence(self):
        described = machine.describe("/no/program", "opt,-O3", {0, 1})
        self.assertEqual(described["mode"], "-c opt -O3")
        self.assertEqual(described["cores_used"], 2)
        described.update(cpu="CPU", cores=os.cpu_count() + 1, memory_gib=24, kernel="6.1.0", date="2000-01-02",
                         compiler="g++ 12")
        self.assertEqual(machine.sentence(described), f"CPU, 2 of {os.cpu_count() + 1} cores, 24 GiB, Linux 6.1.0, "
                         "g++ 12 -c opt -O3, LibTorch 2.11.0; 2000-01-02")


if __name__ == "__main__":
    unittest.main()
