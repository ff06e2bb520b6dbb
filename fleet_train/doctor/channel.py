"""A connection between two doctors: the store's frames and handshake, with a timeout for every message.

Transfers over it measure the bandwidth, and packets next to it the sizes that arrive unfragmented.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

from fleet_train import timeouts
from fleet_train.cluster.network import connect_from
from fleet_train.cluster.store.access import Access, Caller, Refused
from fleet_train.cluster.store.wire import STRANGERS_BYTES, Decoder, Header, ProtocolError, encode, parse

MOST_BYTES = 8 << 20


class Channel:
    """Frames, one after the other. Raises OSError and ProtocolError if the other side does not respond properly."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = Decoder(STRANGERS_BYTES)
        self._frames: list[tuple[Header, Any]] = []
        sock.settimeout(timeouts.DOCTOR_ANSWER_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trust(self) -> None:
        """The other side is a doctor of this job: larger messages are allowed."""
        self._decoder.most_bytes = MOST_BYTES

    def send(self, header: Header, value: Any = None) -> None:
        self.sock.sendall(encode(header, b"" if value is None else json.dumps(value).encode()))

    def receive(self) -> tuple[Header, Any]:
        while not self._frames:
            data = self.sock.recv(1 << 16)
            if not data:
                raise OSError("the connection was closed")
            self._frames += [(parse(head), body) for head, body in self._decoder.feed(data)]
        header, body = self._frames.pop(0)
        try:
            return header, json.loads(bytes(body)) if body else None
        except (ValueError, RecursionError):
            raise ProtocolError("a body is not JSON") from None

    def ask(self, header: Header, value: Any = None) -> tuple[Header, Any]:
        self.send(header, value)
        return self.receive()

    def transfer(self, sends: bool, seconds: float) -> Transferred:
        """Bytes at full speed, in one direction; both ends call it, and get the same. Raises also TimeoutError."""
        own: tuple[float, float]
        if sends:
            self.receive()  # unframed bytes follow: the other side is ready for them
            own = send_stream(self.sock, seconds)
        else:
            self.send({"do": "go"})
            own = receive_stream(self.sock, seconds)
        self.sock.settimeout(timeouts.DOCTOR_ANSWER_SECONDS)
        self.send({"measured": own})
        other = self.receive()[0].get("measured")
        if not isinstance(other, list) or len(other) != 2 or not all(map(is_number, other)):
            raise ProtocolError("no numbers")
        (segments, retransmits), (mean, best) = (own, other) if sends else (other, own)
        return Transferred(mean, best, int(segments), int(retransmits))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


class Transferred(NamedTuple):
    """What the receiver has measured: bytes per second of everything after the first fifth, and of the best window;
    what the sender's kernel has counted."""

    bytes_per_second: float
    best: float
    segments: int
    retransmits: int


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and 0 <= value < 1e15


@contextlib.contextmanager
def dialled(address: str, port: int, access: Access, node: int) -> Iterator[Channel]:
    """Authenticated connection to a doctor. Raises OSError (no listener), ProtocolError and Refused (another job)."""
    channel = Channel(connect_from(access.source, address, port, timeouts.DOCTOR_CONNECT_SECONDS))
    try:
        caller = Caller(access, {"namespace": "", "group": "doctor", "member": node})
        try:
            while (word := caller.heard(channel.receive()[0])) is not None:
                channel.send(word)
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


_BLOCK_BYTES = 1 << 17
"""A transfer is blocks of one size; the first byte marks the last one."""
_MORE, _LAST = b"\0", b"\1"
# struct tcp_info of linux/tcp.h: total_retrans and segs_out.
_RETRANSMITS_AT, _SEGMENTS_AT = 100, 136
_TCP_NOTSENT_LOWAT, _UNSENT_BYTES = 25, 1 << 18
"""Unsent bytes in the kernel: on a slow link more of them would outlast the measurement."""
_WINDOW_SECONDS, _WINDOW_BLOCKS = 0.05, 4
_WARM_UP = 0.2
"""Share of the time that is not counted: a connection starts slowly."""


def send_stream(sock: socket.socket, seconds: float) -> tuple[int, int]:
    """(segments, retransmitted ones). Raises OSError, TimeoutError if the path stalls."""
    block = memoryview(_MORE + bytes(_BLOCK_BYTES - 1))
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    before = _counters(sock)
    sock.settimeout(timeouts.DOCTOR_STALLED_SECONDS)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        sock.sendall(block)
    sock.sendall(_LAST + bytes(_BLOCK_BYTES - 1))
    after = _counters(sock)
    return after[0] - before[0], after[1] - before[1]


def receive_stream(sock: socket.socket, seconds: float) -> tuple[float, float]:
    """(bytes per second, those of the best window), from `send_stream`. Raises OSError, TimeoutError if no more bytes
    arrive."""
    sock.settimeout(timeouts.DOCTOR_STALLED_SECONDS)
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
            return mean, max(mean, best)
        if now - began > seconds + 2 * timeouts.DOCTOR_STALLED_SECONDS:
            raise TimeoutError("the other side does not end")


def _counters(sock: socket.socket) -> tuple[int, int]:
    """(segments, retransmitted ones) of the connection so far; zeros if the kernel does not report them."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except (OSError, AttributeError):
        return 0, 0
    if len(info) < _SEGMENTS_AT + 4:
        return 0, 0
    return struct.unpack_from("I", info, _SEGMENTS_AT)[0], struct.unpack_from("I", info, _RETRANSMITS_AT)[0]


HEADERS_BYTES = 28
"""Headers of IPv4 and UDP; sizes here are those of whole packets, like an interface's MTU."""
SIZES = (
    576, 1000, 1280, 1380, 1400, 1420, 1440, 1450, 1472, 1480, 1492,
    1500, 2000, 4000, 8000, 8500, 8900, 8950, 9000,
)  # fmt: skip
_TRIES = 3
# linux/in.h; Python has no names for them before 3.14.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_PMTUDISC_PROBE, _IP_MTU = 10, 2, 3, 14
_HEAD = struct.Struct(">8sI")


def sweep_packet_sizes(address: str, port: int, source: str, nonce: bytes, mtu: int) -> tuple[int, int]:
    """(largest packet that was answered, the path's MTU according to the kernel); 0: none, unknown.

    UDP with Don't Fragment set: each packet that arrives is answered with its size.
    """
    most = min(mtu, 65535)
    wanted = {size for size in SIZES if size < most} | {most}
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
                head = _HEAD.pack(nonce, size)
                with contextlib.suppress(OSError):  # larger than the interface or a known path MTU: no answer follows
                    sock.send(head + bytes(max(0, size - HEADERS_BYTES - len(head))))
            answered |= _answers(sock, nonce, wanted - answered)
            if answered == wanted:
                break
        known = _path_mtu(address, port, source)
    return max(answered, default=0), known


def _answers(sock: socket.socket, nonce: bytes, missing: set[int]) -> set[int]:
    sizes: set[int] = set()
    deadline = time.monotonic() + timeouts.DOCTOR_PACKET_SECONDS
    while sizes != missing and (left := deadline - time.monotonic()) > 0:
        if not select.select([sock], [], [], left)[0]:
            break
        try:
            answer = sock.recv(64)
        except OSError:
            continue  # an ICMP error for an earlier packet
        if len(answer) == _HEAD.size and answer[:8] == nonce:
            sizes.add(_HEAD.unpack(answer)[1])
    return sizes & missing


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
