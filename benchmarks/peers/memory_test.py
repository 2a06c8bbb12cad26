#!/usr/bin/env python3
"""Tests of memory from /proc, on recorded text and on one process."""
import os
import pathlib
import tempfile
import time
import unittest

import memory
import processes

DEADLINE = 60
ROLLUP = """\
55a7bbf34000-7fffdb003000 ---p 00000000 00:00 0                          [rollup]
Rss:              512340 kB
Pss:              300000 kB
Pss_Dirty:        112000 kB
Shared_Hugetlb:     2048 kB
Private_Hugetlb:    4096 kB
SwapPss:              12 kB
Locked:                0 kB
"""
STATUS = "Name:\ttrain\nVmPeak:\t 9000 kB\nVmHWM:\t  612340 kB\nVmRSS:\t  512340 kB\nThreads:\t3\n"


class MemoryTest(unittest.TestCase):

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.proc = pathlib.Path(temporary.name)

    def add(self, pid, parent=1, environ=b"", rollup=ROLLUP, status=STATUS):
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (train) S {parent} {' '.join(['0'] * 17)} {pid} 0\n")
        (folder / "environ").write_bytes(environ)
        (folder / "smaps_rollup").write_text(rollup)
        (folder / "status").write_text(status)

    def test_lines_in_kilobytes(self):
        values = memory.parse_kilobytes(ROLLUP)
        self.assertEqual(values["Rss"], 512340 * 1024)
        self.assertEqual(len(values), 7)
        self.assertEqual(memory.parse_kilobytes(STATUS),
                         {"VmPeak": 9000 << 10, "VmHWM": 612340 << 10, "VmRSS": 512340 << 10})
        self.assertEqual(memory.parse_kilobytes(""), {})

    def test_pages_outside_of_pss_count(self):
        self.add(5)
        self.assertEqual(memory.take_sample(5, 2, self.proc),
                         ((300000 + 12 + 4096 + 1024) * 1024, 612340 * 1024))

    def test_a_process_that_has_ended_has_no_sample(self):
        self.assertIsNone(memory.take_sample(5, 2, self.proc))
        self.add(5, rollup="", status="Name:\ttrain\n")  # a zombie
        self.assertIsNone(memory.take_sample(5, 2, self.proc))

    def test_ranks_below_a_launcher(self):
        self.add(5)
        self.add(6, 5, b"A=1\0RANK=0\0")
        self.add(7, 5, b"RANK=1\0")
        self.add(8, 7, b"RANK=1\0")  # started by a rank
        self.add(9, 5, b"RANKS=2\0")
        self.assertEqual(memory.rank_pids([5], self.proc), [6, 7])

    def test_processes_that_are_ranks_themselves(self):
        self.add(5)
        self.add(6)
        self.assertEqual(memory.rank_pids([5, 6, 7], self.proc), [5, 6])

    def test_peak_is_that_of_the_sum(self):
        peak = memory.Peak(ranks=2)
        peak.add([])
        self.assertEqual(peak.samples, 0)
        peak.add([memory.Sample(100, 150)])  # the other has not started
        peak.add([memory.Sample(80, 160), memory.Sample(60, 170)])
        peak.add([memory.Sample(120, 180)])  # the other has ended, and all that was shared is this one's
        self.assertEqual((peak.samples, peak.pss, peak.rss), (3, 70, 180))

    def test_watching_a_process(self):
        fifo = self.proc / "fifo"
        os.mkfifo(fifo)
        command = processes.Command("reader", ["/bin/sh", "-c", f"read line < {fifo}"])
        with processes.Group([command], self.proc) as group, memory.Sampler(group.pids, 1) as sampler:
            deadline = time.monotonic() + DEADLINE
            while sampler.peak.samples < 3:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.001)
            fifo.write_text("\n")
            group.wait(DEADLINE)
        self.assertGreater(sampler.peak.pss, 10e3)
        self.assertGreaterEqual(sampler.peak.rss, sampler.peak.pss)


if __name__ == "__main__":
    unittest.main()
