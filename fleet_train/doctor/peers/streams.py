"""Bytes over one connection, at full speed: blocks of one size, the last one marked."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

_BLOCK_BYTES = 1 << 17
_MORE, _LAST = b"\0", b"\1"
STALLED_SECONDS = 2.5
"""A connection that accepts no byte for this long has stalled."""
# struct tcp_info of linux/tcp.h: total_retrans and segs_out.
_RETRANSMITS_AT, _SEGMENTS_AT = 100, 136
_TCP_NOTSENT_LOWAT, _UNSENT_BYTES = 25, 1 << 18
"""Unsent bytes in the kernel: on a slow link more of them would outlast the measurement."""
_WINDOW_SECONDS, _WINDOW_BLOCKS = 0.05, 4
_WARM_UP = 0.2
"""Share of the time that is not counted: a connection starts slowly."""


@dataclass(frozen=True)
class Sent:
    segments: int
    retransmits: int


def send(sock: socket.socket, seconds: float) -> Sent:
    """Raises OSError, TimeoutError if the path stalls."""
    block = memoryview(_MORE + bytes(_BLOCK_BYTES - 1))
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    before = _counters(sock)
    sock.settimeout(STALLED_SECONDS)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        sock.sendall(block)
    sock.sendall(_LAST + bytes(_BLOCK_BYTES - 1))
    after = _counters(sock)
    return Sent(after.segments - before.segments, after.retransmits - before.retransmits)


@dataclass(frozen=True)
class Received:
    """Bytes per second: of everything after the first fifth, and of the best window."""

    mean: float
    best: float


def receive(sock: socket.socket, seconds: float) -> Received:
    """Receives from `send`. Raises OSError, TimeoutError if no more bytes arrive."""
    sock.settimeout(STALLED_SECONDS)
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    began = time.perf_counter()
    counted, since, best = 0, 0.0, 0.0
    window, opened = 0, 0.0
    while True:
        got = 0
        while got < _BLOCK_BYTES:
            number = sock.recv_into(buffer[got:])
            if number == 0:
                raise OSError("the connection was closed")
            got += number
        now = time.perf_counter()
        if since:
            counted += _BLOCK_BYTES
            window += _BLOCK_BYTES
            if window >= _WINDOW_BLOCKS * _BLOCK_BYTES and now - opened >= _WINDOW_SECONDS:
                best, window, opened = max(best, window / (now - opened)), 0, now
        elif now - began >= _WARM_UP * seconds:
            since = opened = now
        if buffer[:1] == _LAST:
            passed = now - since if since and counted else now - began
            mean = (counted or _BLOCK_BYTES) / max(passed, 1e-6)
            return Received(mean, max(mean, best))
        if now - began > seconds + 2 * STALLED_SECONDS:
            raise TimeoutError("the other side does not end")


def _counters(sock: socket.socket) -> Sent:
    """Of the connection so far; zeros if the kernel does not report them."""
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except (OSError, AttributeError):
        return Sent(0, 0)
    if len(told) < _SEGMENTS_AT + 4:
        return Sent(0, 0)
    return Sent(struct.unpack_from("I", told, _SEGMENTS_AT)[0], struct.unpack_from("I", told, _RETRANSMITS_AT)[0])
