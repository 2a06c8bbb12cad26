#!/usr/bin/env python3
"""Tests of groups of processes."""
import os
import pathlib
import select
import signal
import tempfile
import unittest

import processes

DEADLINE = 60


def shell(script, name="fake", **env):
    return processes.Command(name, ["/bin/sh", "-c", script], env)


class ProcessesTest(unittest.TestCase):

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.fifo = self.folder / "fifo"
        os.mkfifo(self.fifo)

    def group(self, *commands, grace=DEADLINE):
        return processes.Group(commands, self.folder, grace)

    def wait_for_pid(self):
        """A handle of the process whose number a command writes into the fifo."""
        fd = os.pidfd_open(int(self.fifo.read_text()))
        self.addCleanup(os.close, fd)
        return fd

    def assert_ends(self, fd):
        self.assertTrue(select.select([fd], [], [], DEADLINE)[0], "still running")

    def test_descendants_of_any_generation(self):
        for pid, parent, state in ((5, 1, "S"), (6, 5, "S"), (8, 6, "S"), (3, 8, "S"), (9, 5, "Z"), (10, 1, "S")):
            (self.folder / str(pid)).mkdir()
            (self.folder / f"{pid}/stat").write_text(f"{pid} (a) b) {state} {parent} {' '.join(['0'] * 18)}\n")
        self.assertEqual([*processes.with_descendants([5], self.folder)], [5, 6, 8, 3])
        self.assertEqual([*processes.with_descendants([3, 7], self.folder)], [3])

    def test_output_of_those_that_end_well(self):
        with self.group(shell("echo one"), shell("echo two; echo err >&2")) as group:
            group.wait(DEADLINE)
            self.assertEqual([group.stdout(0), group.stdout(1)], ["one\n", "two\n"])

    def test_a_failure_names_the_command_and_ends_the_others(self):
        with self.assertRaises(processes.RunError) as caught:
            with self.group(shell(f"echo $$ > {self.fifo}; exec sleep 1000"),
                            shell("echo no such device >&2; exit 3", "rank 1")) as group:
                other = self.wait_for_pid()
                group.wait(DEADLINE)
        self.assert_ends(other)
        self.assertRegex(str(caught.exception), r"^rank 1 exited with code 3\n  command: /bin/sh -c")
        self.assertIn("no such device", str(caught.exception))

    def test_a_signal_has_its_name(self):
        with self.assertRaisesRegex(processes.RunError, r"signal 9 \(SIGKILL\).*memory"):
            with self.group(shell("kill -9 $$")) as group:
                group.wait(DEADLINE)

    def test_at_the_deadline_nothing_is_left(self):
        # Deaf to SIGTERM, with a child that has left its session.
        hanging = f"trap '' TERM; setsid sh -c 'echo $$ > {self.fifo}; exec sleep 1000' & while :; do sleep 1000; done"
        with self.assertRaisesRegex(processes.RunError, "slow did not end within 0.1 s"):
            with self.group(shell(hanging, "slow"), grace=0.1) as group:
                child = self.wait_for_pid()
                shell_itself = os.pidfd_open(group.pids[0])
                self.addCleanup(os.close, shell_itself)
                group.wait(0.1)
        self.assert_ends(child)
        self.assert_ends(shell_itself)

    def test_what_an_ended_command_leaves_behind(self):
        with self.group(shell(f"(echo $$ >/dev/null; sleep 1000) & echo $! > {self.fifo}")) as group:
            child = self.wait_for_pid()
            group.wait(DEADLINE)
        self.assert_ends(child)

    def test_signals_while_processes_are_started_or_ended_come_afterwards(self):
        events = []
        self.addCleanup(signal.signal, signal.SIGTERM, signal.signal(
            signal.SIGTERM, lambda number, _: events.append("signal")))
        with processes.uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            events.append("inside")
        self.assertEqual(events, ["inside", "signal"])

    def test_a_program_that_is_not_there(self):
        with self.assertRaisesRegex(processes.RunError, "peer: cannot start /no/such: No such file"):
            with self.group(shell(f"echo $$ > {self.fifo}; exec sleep 1000"), processes.Command("peer", ["/no/such"])):
                self.fail("entered")

    def test_ranks_of_others_are_not_ours(self):
        environment = {"RANK": "1", "SLURM_PROCID": "1", "PATH": "/bin", "RANKS": "2"}
        self.assertEqual(processes.clean_environment(environment), {"PATH": "/bin", "RANKS": "2"})

    def test_variables_of_a_command(self):
        with self.group(shell("echo $COLOR", COLOR="blue")) as group:
            group.wait(DEADLINE)
            self.assertEqual(group.stdout(0), "blue\n")

    def test_descendants(self):
        proc = self.folder / "proc"
        for pid, parent, name, state in [(1, 0, "init", "S"), (7, 1, "a) b (c", "R"), (8, 7, "x", "S"),
                                         (9, 8, "y", "S"), (10, 8, "ended", "Z"), (11, 1, "other", "S")]:
            (proc / str(pid)).mkdir(parents=True)
            rest = " ".join(["0"] * 17)
            (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {state} {parent} {rest} {pid}00 0\n")
        (proc / "meminfo").write_text("")
        self.assertEqual(processes.with_descendants([7, 99], proc), {7: (1, "700"), 8: (7, "800"), 9: (8, "900")})


if __name__ == "__main__":
    unittest.main()
