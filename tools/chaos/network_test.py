#!/usr/bin/env python3
"""Tests of network.py and slow_cable.py, where this machine can have two hosts."""
import subprocess
import sys
import unittest

import network

ECHO = """
import socket, sys
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind(("10.78.0.2", 5000))
print("bound", flush=True)
while True:
    packet, sender = echo.recvfrom(100)
    echo.sendto(packet, sender)
"""
ASK = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(float(sys.argv[2]))
answers, least = 0, 1000
for number in range(int(sys.argv[1])):
    begin = time.monotonic()
    client.sendto(b"%d" % number, ("10.78.0.2", 5000))
    try:
        while client.recv(100) != b"%d" % number:
            pass
    except socket.timeout:
        continue
    answers, least = answers + 1, min(least, time.monotonic() - begin)
print(answers, least)
"""


class TwoHostsTest(unittest.TestCase):
    def setUp(self):
        try:
            self.hosts = network.TwoHosts()
        except network.NoNetwork as why:
            self.skipTest(str(why))
        self.addCleanup(self.hosts.close)

    def ask(self, packets, timeout_s):
        """How many of these are answered, and how soon at the soonest."""
        echo = subprocess.Popen([*self.hosts.enter(1), sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
        try:
            self.assertEqual(echo.stdout.readline(), b"bound\n")
            asked = subprocess.run([*self.hosts.enter(0), sys.executable, "-c", ASK, str(packets), str(timeout_s)],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        finally:
            echo.kill()
            echo.wait()
            echo.stdout.close()
        answers, least = asked.stdout.split()
        return int(answers), float(least)

    def test_hosts_reach_each_other_but_for_a_cut_cable(self):
        self.assertEqual(self.ask(3, 20)[0], 3)
        self.hosts.set_cable(0, False)
        with self.assertRaises(subprocess.CalledProcessError):  # no route
            self.ask(1, 0.1)

    def test_packets_take_time(self):
        refused = self.hosts.set_netem(0, 0.05)
        if refused is not None:
            self.skipTest(refused)
        answers, least = self.ask(3, 20)
        self.assertEqual(answers, 3)
        self.assertGreaterEqual(least, 0.1)

    def test_packets_are_lost(self):
        refused = self.hosts.set_netem(0.5, 0)
        if refused is not None:
            self.skipTest(refused)
        answers, _ = self.ask(40, 0.1)
        self.assertTrue(0 < answers < 30, answers)  # 10 of them, but for luck


if __name__ == "__main__":
    unittest.main()
