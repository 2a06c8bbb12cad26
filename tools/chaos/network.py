"""Two hosts on this machine: network namespaces joined by a virtual cable, where the kernel and our rights allow it."""
from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import List, Optional, Sequence

CABLE = pathlib.Path(os.path.realpath(__file__)).parent / "slow_cable.py"
ADDRESSES = ("10.78.0.1", "10.78.0.2")


class NoNetwork(Exception):
    """Why there are no two hosts."""


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        raise NoNetwork(f"{' '.join(command)}: {done.stdout.strip()}")


class TwoHosts:
    """Exists as long as two sleeping processes do, which close() ends, with what carries their packets."""

    def __init__(self) -> None:
        for tool in ("ip", "nsenter", "unshare"):
            if shutil.which(tool) is None:
                raise NoNetwork(f"there is no program {tool}")
        self._holders: List["subprocess.Popen[bytes]"] = []
        try:
            for host in range(2):
                self._holders.append(self._hold())
                self.on(host, "ip", "link", "set", "lo", "up")
            self.on(0, "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns",
                    str(self._holders[1].pid))
            for host in range(2):
                self.on(host, "ip", "address", "add", f"{ADDRESSES[host]}/24", "dev", f"cable{host}")
                self.set_cable(host, True)
        except NoNetwork:
            self.close()
            raise

    @staticmethod
    def _hold() -> "subprocess.Popen[bytes]":
        own = os.readlink("/proc/self/ns/net")
        holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"], stdin=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE)
        for _ in range(500):
            if holder.poll() is not None:
                assert holder.stderr is not None
                raise NoNetwork(holder.stderr.read().decode().strip())
            if os.readlink(f"/proc/{holder.pid}/ns/net") != own:
                return holder
            time.sleep(0.01)
        holder.kill()
        raise NoNetwork("unshare --net does not begin")

    def enter(self, host: int) -> List[str]:
        """What a command on that host begins with."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net"]

    def on(self, host: int, *command: str) -> None:
        _run([*self.enter(host), *command])

    def set_cable(self, host: int, up: bool) -> None:
        self.on(host, "ip", "link", "set", f"cable{host}", "up" if up else "down")

    def set_quality(self, how: Sequence[str]) -> Optional[str]:
        """A queueing discipline of both ends, such as ("netem", "loss", "5%"); why not, where the kernel has none."""
        try:
            for host in range(2):
                self.on(host, "tc", "qdisc", "replace", "dev", f"cable{host}", "root", *how)
        except NoNetwork as error:
            return str(error)
        return None

    def set_netem(self, loss: float, delay_s: float) -> Optional[str]:
        """So many of the packets are lost, and the others take so much longer; why not, where that cannot be."""
        refused = self.set_quality(["netem", "loss", f"{100 * loss}%", "delay", f"{1000 * delay_s}ms"])
        if refused is None or not os.path.exists("/dev/net/tun"):
            return refused
        try:
            self._replace_cable(loss, delay_s)
        except NoNetwork as error:
            return str(error)
        return None

    def _replace_cable(self, loss: float, delay_s: float) -> None:
        """By a process that carries packets."""
        self.on(0, "ip", "link", "del", "cable0")
        namespaces = [f"/proc/{holder.pid}/ns/net" for holder in self._holders]
        carrier = subprocess.Popen([sys.executable, str(CABLE), *namespaces, str(loss), str(delay_s)],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._holders.append(carrier)
        assert carrier.stdout is not None and carrier.stderr is not None
        if carrier.stdout.readline() != b"connected\n":
            raise NoNetwork(carrier.stderr.read().decode().strip().splitlines()[-1])
        for host in range(2):
            self.on(host, "ip", "address", "add", ADDRESSES[host], "peer", ADDRESSES[1 - host], "dev", "cable")
            self.on(host, "ip", "link", "set", "cable", "up")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
            for stream in (holder.stdin, holder.stdout, holder.stderr):
                if stream is not None:
                    stream.close()
        self._holders = []
