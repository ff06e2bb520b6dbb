"""The sockets of one node that measure the network, and what goes over them: bytes at full speed, and packets.

They listen at the job's ports, and at two of the kernel's choice. That a port is open shows in a connection, which
nobody needs to accept; packets are answered by a thread. All else is measured over one connection of a pair, by a node
that has the key that this one has published in the store.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from fleet_train import timeouts
from fleet_train.cluster.network import port_is_free, port_owner

_DOCTOR_STALLED_SECONDS = 2.5
"""How long a connection may accept no byte before it has stalled."""
_DOCTOR_PACKET_SECONDS = 0.35
"""How long the answers to one round of packets of all sizes may take."""
_DOCTOR_SELECT_SECONDS = 0.2
"""How often the listener looks whether it is to end."""

_BACKLOG = 1024
KEY_BYTES = 16


@dataclass(frozen=True)
class Door:
    """How others reach a node: its TCP ports, its port for packets, and its key as text, which also names its files."""

    ports: tuple[int, ...]
    udp: int
    key: str

    def __post_init__(self) -> None:
        """Raises ValueError for what no node publishes."""
        if len(self.secret) != KEY_BYTES or not all(0 < port < 1 << 16 for port in (*self.ports, self.udp)):
            raise ValueError("not the door of a node")

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)


class Sockets:
    """Open until ``close``. Raises OSError if a port cannot be opened."""

    def __init__(self, address: str, ports: Iterable[int], key: str) -> None:
        with contextlib.ExitStack() as opened:
            self._tcp = [
                opened.enter_context(socket.create_server((address, port), backlog=_BACKLOG)) for port in (*ports, 0)
            ]
            self._udp = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            self._udp.bind((address, 0))
            self._opened = opened.pop_all()
        for sock in (*self._tcp, self._udp):
            sock.settimeout(_DOCTOR_SELECT_SECONDS)
        *tcp, udp = (int(sock.getsockname()[1]) for sock in (*self._tcp, self._udp))
        self.door = Door(tuple(tcp), udp, key)
        threading.Thread(target=self._answer_packets, name="doctor packets", daemon=True).start()

    def close(self) -> None:
        """Close every port."""
        self._opened.close()

    def _answer_packets(self) -> None:
        """Answer packets, never with more bytes than they have."""
        while self._udp.fileno() >= 0:
            with contextlib.suppress(OSError):
                packet, sender = self._udp.recvfrom(1 << 16)
                if answer := answer_of(packet, self.door.secret):
                    self._udp.sendto(answer, sender)

    def accept(self, word: bytes, seconds: float) -> socket.socket:
        """The connection of who says this word. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for listener in select.select(self._tcp, [], [], left)[0]:
                with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
                    sock = opened.enter_context(listener.accept()[0])
                    sock.settimeout(timeouts.DOCTOR_CONNECT_SECONDS)
                    if hmac.compare_digest(received(sock, len(word)), word):
                        opened.pop_all()
                        return sock
        raise TimeoutError("the other node did not connect")


_MEASURED = struct.Struct(">2d")
_MOST_NUMBER = 1e15


def transfer(sock: socket.socket, sends: bool, seconds: float) -> tuple[float, float, int, int]:
    """Measure bytes at full speed, in one direction; both ends call it, and get the same. Raises OSError, TimeoutError
    if the path stalls.

    What the receiver has measured: bytes per second of everything after the first fifth, and of the best window; what
    the sender's kernel has counted: segments, and those that it has sent again.
    """
    own = send_stream(sock, seconds) if sends else receive_stream(sock, seconds)
    sock.settimeout(timeouts.DOCTOR_ANSWER_SECONDS)
    sock.sendall(_MEASURED.pack(*own))
    other = _MEASURED.unpack(received(sock, _MEASURED.size))
    if not all(0 <= number < _MOST_NUMBER for number in other):
        raise OSError("the other side gives no numbers")
    (segments, retransmits), (mean, best) = (own, other) if sends else (other, own)
    return mean, best, int(segments), int(retransmits)


def received(sock: socket.socket, size: int) -> bytes:
    """Receive exactly so many bytes. Raises OSError."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise OSError("the connection was closed")
        data += piece
    return data


_BLOCK_BYTES = 1 << 17
"""A transfer is blocks of one size; the first byte marks the last one."""
_MORE, _LAST = b"\0", b"\1"
# struct tcp_info of linux/tcp.h: total_retrans and segs_out.
_RETRANSMITS_AT, _SEGMENTS_AT = 100, 136
_TCP_NOTSENT_LOWAT, _UNSENT_BYTES = 25, 1 << 18
"""How many unsent bytes the kernel holds: on a slow link more of them would outlast the measurement."""
_WINDOW_SECONDS, _WINDOW_BLOCKS = 0.05, 4
_WARM_UP = 0.2
"""Share of the time that is not counted: a connection starts slowly."""


def send_stream(sock: socket.socket, seconds: float) -> tuple[int, int]:
    """Send at full speed; returns (segments, retransmitted ones). Raises OSError, TimeoutError if the path stalls."""
    block = memoryview(_MORE + bytes(_BLOCK_BYTES - 1))
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    before = _counters(sock)
    sock.settimeout(_DOCTOR_STALLED_SECONDS)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        sock.sendall(block)
    sock.sendall(_LAST + bytes(_BLOCK_BYTES - 1))
    after = _counters(sock)
    return after[0] - before[0], after[1] - before[1]


def receive_stream(sock: socket.socket, seconds: float) -> tuple[float, float]:
    """Receive what `send_stream` sends; returns (bytes per second, those of the best window). Raises OSError,
    TimeoutError if no more bytes arrive."""
    sock.settimeout(_DOCTOR_STALLED_SECONDS)
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
        if now - began > seconds + 2 * _DOCTOR_STALLED_SECONDS:
            raise TimeoutError("the other side does not end")


def _counters(sock: socket.socket) -> tuple[int, int]:
    """The connection's counters so far: (segments, retransmitted ones); zeros if the kernel does not report them."""
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
    """Send packets of many sizes: (largest one that was answered, the path's MTU according to the kernel); 0: none,
    unknown.

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
                head = _HEAD.pack(nonce[:8], size)
                with contextlib.suppress(OSError):  # larger than the interface or a known path MTU: no answer follows
                    sock.send(head + bytes(max(0, size - HEADERS_BYTES - len(head))))
            answered |= _answers(sock, nonce, wanted - answered)
            if answered == wanted:
                break
        known = 0
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
            sock.connect((address, port))  # again: by the route as it is known now
            known = sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    return max(answered, default=0), known


def _answers(sock: socket.socket, nonce: bytes, missing: set[int]) -> set[int]:
    sizes: set[int] = set()
    deadline = time.monotonic() + _DOCTOR_PACKET_SECONDS
    while sizes != missing and (left := deadline - time.monotonic()) > 0:
        if not select.select([sock], [], [], left)[0]:
            break
        try:
            answer = sock.recv(64)
        except OSError:
            continue  # an ICMP error for an earlier packet
        if len(answer) == _HEAD.size and answer[:8] == nonce[:8]:
            sizes.add(_HEAD.unpack(answer)[1])
    return sizes & missing


def answer_of(packet: bytes, nonce: bytes) -> bytes:
    """The answer to a packet of `sweep_packet_sizes`: its first bytes, which contain its size; nothing for others."""
    if len(packet) < _HEAD.size or packet[:8] != nonce[:8]:
        return b""
    return packet[: _HEAD.size] if _HEAD.unpack_from(packet)[1] == len(packet) + HEADERS_BYTES else b""


def held_ports(address: str, ports: Iterable[int]) -> dict[int, str]:
    """The ports that cannot be opened, or would refuse only a second listener, and their processes."""
    return {port: str(port_owner(port, address)) for port in ports if not port_is_free(address, port)}


def outcome_of(error: OSError) -> str:
    """Why a connection failed, in the terms of `PortTry`."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "timed out"
    if error.errno is None or isinstance(error, ConnectionError):
        return "another program"
    return f"no route ({error.strerror or 'failed'})"
