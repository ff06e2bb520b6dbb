"""Messages between a parent and a rank's process: a JSON header and a body, over a socket pair."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

_SIZES = struct.Struct("!IQ")  # bytes of the header, bytes of the body
_PIECE_BYTES = 1 << 20

Message = tuple[dict[str, Any], bytes]


def packed(header: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return b"".join((_SIZES.pack(len(text), len(body)), text, body))


class RankChannel:
    """The rank's end: calls block. The end of the parent raises EOFError."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        self._sock.sendall(packed(header, body))

    def receive(self) -> Message:
        sizes = _SIZES.unpack(self._exactly(_SIZES.size))
        header, body = (self._exactly(size) for size in sizes)
        return json.loads(header), bytes(body)

    def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            count = self._sock.recv_into(rest, min(len(rest), _PIECE_BYTES))
            if not count:
                raise EOFError
            rest = rest[count:]
        return found


class ParentEnd:
    """The parent's end: nothing blocks. The caller that waits for several ranks polls ``sock``."""

    def __init__(self, sock: socket.socket, greeting: bytes) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._unsent = memoryview(greeting)
        self._received = bytearray()

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._unsent)

    def send_some(self) -> None:
        """Send as much of the greeting as possible now. A rank that has ended is noticed by its process's monitor."""
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent[:_PIECE_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = self._unsent[:0]

    def receive_some(self) -> bool:
        """Read available data; False once no more will arrive."""
        while True:
            try:
                piece = self.sock.recv(_PIECE_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not piece:
                return False
            self._received += piece

    def messages(self) -> Iterator[Message]:
        """The complete messages, each once."""
        while len(self._received) >= _SIZES.size:
            header, body = _SIZES.unpack_from(self._received)
            end = _SIZES.size + header + body
            if len(self._received) < end:
                return
            told = bytes(self._received[_SIZES.size : end])
            del self._received[:end]
            yield json.loads(told[:header]), told[header:]
