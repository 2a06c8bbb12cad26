"""A cable between two network namespaces that loses packets and takes time, where the kernel has no netem.

usage: slow_cable.py NAMESPACE NAMESPACE LOSS DELAY_S

Namespaces are files such as /proc/1/ns/net. In each a TUN device `cable` appears, of which the user sets the address.
Ends with its standard input.
"""
import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def open_device(namespace: str) -> int:
    """A device there; this process stays in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"entering {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"cable", _IFF_TUN | _IFF_NO_PI))
    return device


def write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:
        pass  # it is down, or full: lost


def carry(devices, loss: float, delay_s: float) -> None:
    draw = random.Random(0)
    on_the_way = collections.deque()  # when it is due, to where, what
    while True:
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        ready, _, _ = select.select([0, *devices], [], [], wait)
        if 0 in ready and not os.read(0, 1):
            return
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, device, packet = on_the_way.popleft()
            write(device, packet)
        for device in ready:
            if device == 0:
                continue
            other = devices[1] if device == devices[0] else devices[0]
            try:
                packet = os.read(device, 1 << 16)
            except OSError:
                continue
            if draw.random() >= loss:
                on_the_way.append((now + delay_s, other, packet))


def main(argv) -> None:
    devices = [open_device(namespace) for namespace in argv[:2]]
    print("connected", flush=True)
    carry(devices, float(argv[2]), float(argv[3]))


if __name__ == "__main__":
    main(sys.argv[1:])
