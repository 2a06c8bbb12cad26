"""Two hosts on this machine: network namespaces joined by a virtual cable, where the kernel and our rights allow it."""
from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import List, Optional, Sequence

ADDRESSES = ("10.78.0.1", "10.78.0.2")


class NoNetwork(Exception):
    """Why there are no two hosts."""


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        raise NoNetwork(f"{' '.join(command)}: {done.stdout.strip()}")


class TwoHosts:
    """Exists as long as two sleeping processes do, which close() ends."""

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

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
            if holder.stderr is not None:
                holder.stderr.close()
        self._holders = []
