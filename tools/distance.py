"""A switch that keeps each frame for a while, as distance does: tools/lab.py starts it where a lab has an ``rtt``.

    python tools/distance.py 0.01 port0 port1

Makes a tap for each name in its own network namespace, says ``ready`` on stdout, and hands on frames between them,
each after the seconds of the first argument, until it is killed. Frames of one way keep their order; an unknown
receiver's go to all. Kernels for small machines lack netem, which would do the same.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

# linux/if_tun.h. A tap with the header of virtio takes whole pieces of a stream, as a network card with offload does.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUM_AND_SEGMENTATION = 0x01 | 0x02 | 0x04
_VIRTIO_HEADER, _ADDRESS = 10, 6
_MOST_BYTES = 1 << 17


def tap(name: str) -> int:
    """The descriptor of a new tap."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUM_AND_SEGMENTATION)
    return descriptor


class Switch:
    """``seconds``: how long each frame is kept."""

    def __init__(self, ports: list[int], seconds: float) -> None:
        self._ports, self._seconds = ports, seconds
        self._under_way: deque[tuple[float, int, bytes]] = deque()
        self._learned: dict[bytes, int] = {}

    def turn(self) -> None:
        """Wait for a frame or for the moment at which one is due, take what is there, hand on what is due."""
        until = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
        for port in select.select(self._ports, [], [], until)[0]:
            self._take(port)
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, port, frame = self._under_way.popleft()
            self._hand_on(port, frame)

    def _take(self, port: int) -> None:
        try:
            frame = os.read(port, _MOST_BYTES)
        except BlockingIOError:
            return
        sender = _VIRTIO_HEADER + _ADDRESS
        self._learned[frame[sender : sender + _ADDRESS]] = port
        self._under_way.append((time.monotonic() + self._seconds, port, frame))

    def _hand_on(self, port: int, frame: bytes) -> None:
        known = self._learned.get(frame[_VIRTIO_HEADER : _VIRTIO_HEADER + _ADDRESS])
        for other in self._ports if known is None else [known]:
            if other != port:
                try:
                    os.write(other, frame)
                except OSError:  # the receiver's interface is down, or its queue full: a frame is lost, as on a wire
                    continue


def main() -> None:
    seconds, *names = sys.argv[1:]
    switch = Switch([tap(name) for name in names], float(seconds))
    print("ready", flush=True)
    while True:
        switch.turn()


if __name__ == "__main__":
    main()
