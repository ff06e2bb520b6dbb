"""A connection between two doctors: the store's frames and handshake, with a timeout for every message."""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fleet_train.cluster.network import connect_from
from fleet_train.cluster.store.access import Access, Caller, Refused
from fleet_train.cluster.store.wire import STRANGERS_BYTES, Decoder, Header, ProtocolError, encode, parse

MOST_BYTES = 8 << 20
WORD_SECONDS = 4.0
DIAL_SECONDS = 2.5
"""A lost first packet is retransmitted after 1 s."""


class Channel:
    """Frames, one after the other. Raises OSError and ProtocolError if the other side does not respond properly."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = Decoder(STRANGERS_BYTES)
        self._frames: list[tuple[Header, Any]] = []
        sock.settimeout(WORD_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trust(self) -> None:
        """The other side is a doctor of this job: larger messages are allowed."""
        self._decoder.most_bytes = MOST_BYTES

    def say(self, header: Header, value: Any = None) -> None:
        self.sock.sendall(encode(header, b"" if value is None else json.dumps(value).encode()))

    def hear(self) -> tuple[Header, Any]:
        while not self._frames:
            data = self.sock.recv(1 << 16)
            if not data:
                raise OSError("the connection was closed")
            for header, body in self._decoder.feed(data):
                self._frames.append((parse(header), body))
        heard, told = self._frames.pop(0)
        try:
            return heard, json.loads(bytes(told)) if told else None
        except (ValueError, RecursionError):
            raise ProtocolError("a body is not JSON") from None

    def ask(self, header: Header, value: Any = None) -> tuple[Header, Any]:
        self.say(header, value)
        return self.hear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


@contextlib.contextmanager
def dialled(address: str, port: int, access: Access, node: int) -> Iterator[Channel]:
    """Authenticated connection to a doctor. Raises OSError (no listener), ProtocolError and Refused (another job)."""
    channel = Channel(connect_from(access.source, address, port, DIAL_SECONDS))
    try:
        caller = Caller(access, {"round": "", "group": "doctor", "member": node})
        try:
            while (word := caller.heard(channel.hear()[0])) is not None:
                channel.say(word)
        except (ConnectionError, TimeoutError) as error:
            raise ProtocolError(f"it does not use the doctor's protocol: {error}") from None
        except OSError as error:
            raise ProtocolError(str(error)) from None
        channel.trust()
        yield channel
    finally:
        channel.close()


def outcome_of(error: Exception) -> str:
    """Why a connection failed, in the terms of `PortTry`."""
    if isinstance(error, (ProtocolError, Refused)):
        return "another program"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT):
        return "timed out"
    reason = getattr(error, "strerror", "") or "failed"
    return f"no route ({reason})"


# Bytes over one connection, at full speed: blocks of one size, the last one marked.


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


def send_stream(sock: socket.socket, seconds: float) -> Sent:
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


def receive_stream(sock: socket.socket, seconds: float) -> Received:
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


# The packet sizes that reach a node unfragmented: UDP with Don't Fragment set, each answered with its size.


HEADERS_BYTES = 28
"""Headers of IPv4 and UDP; sizes here are those of whole packets, like an interface's MTU."""
SIZES = (
    576, 1000, 1280, 1380, 1400, 1420, 1440, 1450, 1472, 1480, 1492,
    1500, 2000, 4000, 8000, 8500, 8900, 8950, 9000,
)  # fmt: skip
_TRIES, _WAIT_SECONDS = 3, 0.35
# linux/in.h; Python has no names for them before 3.14.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_PMTUDISC_PROBE, _IP_MTU = 10, 2, 3, 14
_HEAD = struct.Struct(">8sI")


def sizes_up_to(mtu: int) -> list[int]:
    """The sizes to try on an interface of this MTU, itself included."""
    return sorted({size for size in SIZES if size < mtu} | {mtu})


def sweep_packet_sizes(address: str, port: int, source: str, nonce: bytes, mtu: int) -> tuple[int, int]:
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


def answer_datagrams(sock: socket.socket, nonce: bytes) -> None:
    """Answers one received packet with its first bytes, which contain its size. Never with more bytes than received."""
    try:
        packet, sender = sock.recvfrom(1 << 16)
        if len(packet) >= _HEAD.size and packet[:8] == nonce:
            size = _HEAD.unpack_from(packet)[1]
            if size == len(packet) + HEADERS_BYTES:
                sock.sendto(packet[: _HEAD.size], sender)
    except OSError:
        pass
