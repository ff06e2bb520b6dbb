"""The packet sizes that reach a node unfragmented: UDP with Don't Fragment set, each answered with its size."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time

HEADERS_BYTES = 28
"""Headers of IPv4 and UDP; sizes here are those of whole packets, like an interface's MTU."""
SIZES = (
    576,
    1000,
    1280,
    1380,
    1400,
    1420,
    1440,
    1450,
    1472,
    1480,
    1492,
    1500,
    2000,
    4000,
    8000,
    8500,
    8900,
    8950,
    9000,
)
_TRIES, _WAIT_SECONDS = 3, 0.35
# linux/in.h; Python has no names for them before 3.14.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_PMTUDISC_PROBE, _IP_MTU = 10, 2, 3, 14
_HEAD = struct.Struct(">8sI")


def sizes_up_to(mtu: int) -> list[int]:
    """The sizes to try on an interface of this MTU, itself included."""
    return sorted({size for size in SIZES if size < mtu} | {mtu})


def sweep(address: str, port: int, source: str, nonce: bytes, mtu: int) -> tuple[int, int]:
    """(largest packet that was answered, the path's MTU according to the kernel); 0: none, unknown."""
    wanted = set(sizes_up_to(min(mtu, 65535)))
    answered: set[int] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        try:
            sock.bind((source, 0))
            sock.connect((address, port))
        except OSError:
            return 0, 0
        for _ in range(_TRIES):
            for size in sorted(wanted - answered):
                _send(sock, nonce, size)
            answered |= _answers(sock, nonce, wanted - answered)
            if answered == wanted:
                break
        known = _path_mtu(address, port, source)
    return max(answered, default=0), known


def _send(sock: socket.socket, nonce: bytes, size: int) -> None:
    head = _HEAD.pack(nonce, size)
    with contextlib.suppress(OSError):  # larger than the interface or a known path MTU allows: no answer will arrive
        sock.send(head + bytes(max(0, size - HEADERS_BYTES - len(head))))


def _answers(sock: socket.socket, nonce: bytes, missing: set[int]) -> set[int]:
    found: set[int] = set()
    deadline = time.monotonic() + _WAIT_SECONDS
    while found != missing and (left := deadline - time.monotonic()) > 0:
        if not select.select([sock], [], [], left)[0]:
            break
        try:
            answer = sock.recv(64)
        except OSError:
            continue  # an ICMP error for an earlier packet
        if len(answer) == _HEAD.size and answer[:8] == nonce:
            found.add(_HEAD.unpack(answer)[1])
    return found & missing


def _path_mtu(address: str, port: int, source: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
            sock.bind((source, 0))
            sock.connect((address, port))
            return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        except OSError:
            return 0


def answer(sock: socket.socket, nonce: bytes) -> None:
    """Answers one received packet with its first bytes, which contain its size. Never with more bytes than received."""
    try:
        packet, sender = sock.recvfrom(1 << 16)
        if len(packet) >= _HEAD.size and packet[:8] == nonce:
            size = _HEAD.unpack_from(packet)[1]
            if size == len(packet) + HEADERS_BYTES:
                sock.sendto(packet[: _HEAD.size], sender)
    except OSError:
        pass
