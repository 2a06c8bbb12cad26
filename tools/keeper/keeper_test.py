#!/usr/bin/env python3
"""The keeper as a process: who gets in, what it says, and how it ends."""

import hashlib
import hmac
import os
import re
import signal
import socket
import subprocess
import unittest

PROGRAM = "tools/keeper/keeper"  # among this test's runfiles
MAGIC = b"FSDPjob1"
SECONDS = 30


def start(flags, secret):
    variables = {} if secret is None else {"FSDP_JOB_SECRET": secret}
    return subprocess.Popen([PROGRAM] + flags, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            universal_newlines=True)


def run(flags, secret=None):
    process = start(flags, secret)
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def gets_in(port, secret):
    """Whether the keeper takes a caller with this secret for one of the job."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as caller:
        stream = caller.makefile("rb")
        greeting = stream.read(len(MAGIC) + 32)
        assert greeting.startswith(MAGIC), greeting
        nonces = greeting[len(MAGIC):] + os.urandom(32)

        def proof(role):
            return hmac.new(secret.encode(), MAGIC + role + nonces, hashlib.sha256).digest()

        caller.sendall(MAGIC + nonces[32:] + proof(b"caller"))
        return stream.read(32) == proof(b"listener")


class KeeperTest(unittest.TestCase):

    def keep(self, flags, secret):
        """A keeper, the line that it says, and the port in it."""
        process = start(flags, secret)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait, SECONDS)
        self.addCleanup(process.kill)
        line = process.stdout.readline()
        found = re.match("keeper: listens on port ([0-9]+) ", line)
        self.assertTrue(found, line)
        return process, line, int(found.group(1))

    def test_serves_those_who_know_the_secret_until_it_is_told_to_end(self):
        for end in (signal.SIGTERM, signal.SIGINT):
            process, line, port = self.keep(["--port=0"], "ours")
            self.assertTrue(line.endswith(f" of all interfaces; FSDP_REPLICA_STORE=<this host>:{port}\n"), line)
            self.assertTrue(gets_in(port, "ours"))
            self.assertFalse(gets_in(port, "theirs"))
            self.assertFalse(gets_in(port, ""))
            process.send_signal(end)
            self.assertEqual(process.wait(SECONDS), 0)
            with self.assertRaises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=SECONDS)

    def test_without_a_secret_only_on_purpose(self):
        for secret in (None, ""):
            code, output = run(["--port=0"], secret)
            self.assertEqual(code, 2)
            self.assertIn("FSDP_JOB_SECRET is not set", output)
            _, line, port = self.keep(["--port=0", "--insecure"], secret)
            self.assertIn(", for anybody;", line)
            self.assertTrue(gets_in(port, ""))

    def test_insecure_does_not_open_one_that_has_a_secret(self):
        _, line, port = self.keep(["--port=0", "--insecure"], "ours")
        self.assertNotIn("anybody", line)
        self.assertFalse(gets_in(port, ""))

    def test_may_be_for_this_host_alone(self):
        _, line, port = self.keep(["--port=0", "--address=127.0.0.1"], "ours")
        self.assertTrue(line.endswith(f" of 127.0.0.1; FSDP_REPLICA_STORE=127.0.0.1:{port}\n"), line)
        self.assertTrue(gets_in(port, "ours"))

    def test_an_address_with_colons_is_told_in_brackets(self):
        try:
            socket.socket(socket.AF_INET6).bind(("::1", 0))
        except OSError:
            self.skipTest("there is no IPv6")
        _, line, port = self.keep(["--port=0", "--address=::1"], "ours")
        self.assertTrue(line.endswith(f"; FSDP_REPLICA_STORE=[::1]:{port}\n"), line)

    def test_a_port_in_use_is_named(self):
        _, _, port = self.keep(["--port=0", "--address=127.0.0.1"], "ours")
        code, output = run([f"--port={port}", "--address=127.0.0.1"], "ours")
        self.assertEqual(code, 1)
        self.assertIn(f"port {port} is already in use on this host", output)

    def test_refuses_what_it_does_not_understand(self):
        for flags, text in ((["--port=65536"], "--port=65536: expected 0 to 65535"),
                            (["--port=-1"], "--port=-1: expected"),
                            (["--address=node1"], "--address=node1: expected a loopback address"),
                            (["serve"], '"serve": expected flags only')):
            code, output = run(flags, "ours")
            self.assertEqual(code, 2, output)
            self.assertIn(text, output)

    def test_help_has_all_flags(self):
        for word in ("--help", "-help", "--helpfull", "--helpshort", "--help=keeper"):
            code, output = run(["--port=1", word])
            self.assertEqual(code, 0, output)
            for text in ("--port", "--address", "--insecure", "FSDP_JOB_SECRET", "FSDP_REPLICA_INCARNATION"):
                self.assertIn(text, output)

    def test_help_hides_no_error(self):
        for flags in (["--prot=1", "--help"], ["-help", "--prot=1"], ["--helpful"]):
            code, output = run(flags)
            self.assertEqual(code, 1, output)
            self.assertRegex(output, "Unknown command line flag '(prot|helpful)'")


if __name__ == "__main__":
    unittest.main()
