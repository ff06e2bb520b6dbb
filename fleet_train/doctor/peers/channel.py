"""A connection between two doctors: the store's frames and handshake, with a timeout for every message."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from collections.abc import Iterator
from typing import Any

from fleet_train.cluster.store.protocol.access import Access
from fleet_train.cluster.store.protocol.greeting import Caller, Refused
from fleet_train.cluster.store.protocol.wire import STRANGERS_BYTES, Decoder, Header, ProtocolError, encode, parse

MOST_BYTES = 8 << 20
WORD_SECONDS = 4.0
DIAL_SECONDS = 2.5
"""A lost first packet is retransmitted after 1 s."""
_UNBINDABLE = (errno.EADDRNOTAVAIL, errno.EINVAL)


class Channel:
    """Frames, one after the other. Raises OSError and ProtocolError if the other side does not respond properly."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = Decoder(expects_preamble=False, most_bytes=STRANGERS_BYTES)
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
    channel = Channel(connect(address, port, access.source))
    try:
        caller = Caller(access, {"round": "", "group": "doctor", "member": node})
        word: Header | None = caller.hello
        try:
            while word is not None:
                channel.say(word)
                word = caller.heard(channel.hear()[0])
        except (ConnectionError, TimeoutError) as error:
            raise ProtocolError(f"it does not use the doctor's protocol: {error}") from None
        except OSError as error:
            raise ProtocolError(str(error)) from None
        channel.trust()
        yield channel
    finally:
        channel.close()


def connect(address: str, port: int, source: str, seconds: float = DIAL_SECONDS) -> socket.socket:
    """From this machine's address in the node list, as a job does. Raises OSError."""
    try:
        return _connect(address, port, source, seconds)
    except OSError as error:
        if error.errno not in _UNBINDABLE:
            raise
    return _connect(address, port, "", seconds)


def _connect(address: str, port: int, source: str, seconds: float) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        if source:
            sock.bind((source, 0))
        sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


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
