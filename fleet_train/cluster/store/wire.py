"""The wire format between a member and the rendezvous store: frames over TCP, each with a header and a body.

A connection begins with a preamble, which other protocols do not send. A frame is two lengths (unsigned, 32 bits, big
endian), a header (a JSON object of a few fields, checked one by one) and a body that the store keeps and forwards
unchanged, without parsing it. No pickle.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Iterator
from typing import Any

Json = Any
Header = dict[str, Any]
Body = bytes | bytearray

PREAMBLE = b"fleet_train store 2\n"
LENGTHS = struct.Struct(">II")
# Before a connection is authenticated, then after.
STRANGERS_BYTES = 4096
MOST_HEADER_BYTES = 1 << 18
MOST_BODY_BYTES = 64 << 20
MOST_TEXT = 2000
_LARGE_BYTES = 1 << 16

# A machine that disappears without closing its connections is noticed after idle + interval * count = 20 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))


class ProtocolError(Exception):
    """The other side uses another protocol, or violates this one; its connection ends."""


def encode(header: Header, body: Body = b"") -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return LENGTHS.pack(len(text), len(body)) + text + body


class Decoder:
    """Splits a stream of bytes into frames and refuses what is too long before it has arrived."""

    def __init__(self, *, expects_preamble: bool, most_bytes: int = MOST_BODY_BYTES) -> None:
        self.most_bytes = most_bytes
        """The limit of a frame's body, and of its header if it is below the header's own limit."""
        self._expects_preamble = expects_preamble
        self._buffer = bytearray()
        self._head = b""
        self._large = bytearray()
        self._large_bytes = 0
        """A large body in transfer: it grows in place, and is not copied again."""

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[bytes, Body]]:
        """Every (header, body) that ``data`` completes. Raises ProtocolError; bounds may change between frames."""
        if self._large_bytes:
            missing = self._large_bytes - len(self._large)
            self._large += data[:missing]
            if len(self._large) < self._large_bytes:
                return
            frame, self._large, self._large_bytes = (self._head, self._large), bytearray(), 0
            yield frame
            data = data[missing:]
        if not self._buffer and not self._expects_preamble and (whole := self._whole(data)) is not None:
            yield whole
            return
        self._buffer += data
        if self._expects_preamble:
            self._read_preamble()
        while not self._expects_preamble and len(self._buffer) >= LENGTHS.size:
            header, body = self._lengths(self._buffer)
            cut = LENGTHS.size + header
            end = cut + body
            if len(self._buffer) < end:
                if body > _LARGE_BYTES and len(self._buffer) >= cut:
                    self._head, self._large_bytes = bytes(self._buffer[LENGTHS.size : cut]), body
                    self._large, self._buffer = self._buffer[cut:], bytearray()
                return
            small = bytes(self._buffer[LENGTHS.size : cut]), bytes(self._buffer[cut:end])
            del self._buffer[:end]
            yield small

    def _whole(self, data: bytes | memoryview) -> tuple[bytes, Body] | None:
        """The usual case: one small frame, and nothing else."""
        if not LENGTHS.size <= len(data) <= _LARGE_BYTES:
            return None
        header, body = self._lengths(data)
        cut = LENGTHS.size + header
        return (bytes(data[LENGTHS.size : cut]), bytes(data[cut:])) if len(data) == cut + body else None

    def _lengths(self, data: bytes | bytearray | memoryview) -> tuple[int, int]:
        header, body = LENGTHS.unpack_from(data)
        if header > min(self.most_bytes, MOST_HEADER_BYTES) or body > self.most_bytes:
            raise ProtocolError(f"a frame of {header} + {body} bytes is too long")
        return header, body

    def _read_preamble(self) -> None:
        head = self._buffer[: len(PREAMBLE)]
        if not PREAMBLE.startswith(head):
            raise ProtocolError("the first bytes are not this protocol's")
        if len(head) == len(PREAMBLE):
            del self._buffer[: len(PREAMBLE)]
            self._expects_preamble = False


def parse(header: Body) -> Header:
    """The header of a frame. Raises ProtocolError unless it is a JSON object of bounded depth and numbers."""
    try:
        text = header.decode()
        parsed, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        raise ProtocolError("a header is not JSON") from None
    if not isinstance(parsed, dict) or end != len(text):
        raise ProtocolError("a header is not a JSON object")
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class Fields:
    """A header whose fields are read by name, type and bounds. Each raises ProtocolError naming the field."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def text(self, name: str, default: str | None = None, most: int = MOST_TEXT) -> str:
        value = self.header.get(name, default)
        if not isinstance(value, str) or len(value) > most:
            raise ProtocolError(f"{name} is not a text of at most {most} characters")
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        value = self.header.get(name)
        if type(value) is not int or not least <= value <= most:
            raise ProtocolError(f"{name} is not a whole number from {least} to {most}")
        return value

    def number(self, name: str, most: float = 1e12) -> float:
        """From 0 on."""
        value: Any = self.header.get(name)
        if type(value) not in (int, float) or not 0 <= value <= most:
            raise ProtocolError(f"{name} is not a number from 0 to {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        return self.header.get(name) is True

    def optional_seconds(self, name: str) -> float | None:
        return None if self.header.get(name) is None else max(0.05, self.number(name, 1e7))


def numbers(value: Json, count: int) -> list[float]:
    """A list of ``count`` finite numbers. Raises ProtocolError."""
    if not isinstance(value, list) or len(value) != count:
        raise ProtocolError(f"not a list of {count} numbers")
    if not all(type(each) in (int, float) and abs(each) < 1e300 and math.isfinite(each) for each in value):
        raise ProtocolError("a list holds something other than finite numbers")
    return [float(each) for each in value]


def printable(text: str, most: int = MOST_TEXT) -> str:
    """``text`` for a terminal or a log: it is cut, and control characters but line ends and tabs become escapes."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text[:most])
    return shown if len(text) <= most else f"{shown}... ({len(text)} characters)"


def keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)  # Linux has all four, other systems some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
