"""The wire format between a member and the rendezvous store: frames over TCP, each with a header and a body.

A frame is two lengths (unsigned, 32 bits, big endian), a header (a JSON object of a few fields, checked one by one) and
a body that the store keeps and forwards unchanged, without parsing it. No pickle. The first bytes of another protocol
are lengths beyond every limit, so its connection ends at once. Sets of members are ranges in a header, and integers
with one bit per member in memory: ten thousand members are 1.25 KB, and a union is one operation.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
from collections.abc import Iterator
from typing import Any

from fleet_train.errors import ClusterError, printable

Json = Any
Header = dict[str, Any]
Body = bytes

VERSION = 3
"""Of the protocol; a server names it first, and all members of a job have the same."""
LENGTHS = struct.Struct(">II")
# Before a connection is authenticated, then after.
STRANGERS_BYTES = 4096
MOST_HEADER_BYTES = 1 << 18
MOST_BODY_BYTES = 64 << 20
MOST_TEXT = 2000
MOST_NAME = 500
MOST_MEMBERS = 1 << 17
"""A bound for untrusted input; Paddle's own limits are far lower."""

# A machine that disappears without closing its connections is noticed after idle + interval * count = 20 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))


class ProtocolError(Exception):
    """The other side uses another protocol, or violates this one; its connection ends."""


def to_json(value: Json) -> Body:
    return json.dumps(value, separators=(",", ":")).encode()


def encode(header: Header, body: Body = b"") -> bytes:
    text = to_json(header)
    return LENGTHS.pack(len(text), len(body)) + text + body


class Decoder:
    """Splits a stream of bytes into frames and refuses what is too long before it has arrived."""

    def __init__(self, most_bytes: int = MOST_BODY_BYTES) -> None:
        self.most_bytes = most_bytes
        """The limit of a frame's body, and of its header if it is below the header's own limit."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, Body]]:
        """Every (header, body) that ``data`` completes. Raises ProtocolError; bounds may change between frames."""
        self._buffer += data
        while len(self._buffer) >= LENGTHS.size:
            header, body = LENGTHS.unpack_from(self._buffer)
            if header > min(self.most_bytes, MOST_HEADER_BYTES) or body > self.most_bytes:
                raise ProtocolError(f"a frame of {header} + {body} bytes is too long")
            cut = LENGTHS.size + header
            end = cut + body
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                frame = bytes(view[LENGTHS.size : cut]), bytes(view[cut:end])
            del self._buffer[:end]
            yield frame


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


def all_members(count: int) -> int:
    """The set of members 0 .. count-1."""
    return (1 << count) - 1


def first_member(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def each_member(mask: int) -> Iterator[int]:
    for low, high in to_ranges(mask):
        yield from range(low, high + 1)


def to_ranges(mask: int) -> list[list[int]]:
    """``[[first, last], ...]``, both inclusive, in rising order."""
    ranges = []
    start = 0
    while mask:
        zeros = first_member(mask)
        mask >>= zeros
        ones = first_member(~mask)
        ranges.append([start + zeros, start + zeros + ones - 1])
        mask >>= ones
        start += zeros + ones
    return ranges


def from_ranges(ranges: Json, count: int = MOST_MEMBERS) -> int:
    """The set that ``to_ranges`` describes. Raises ProtocolError for anything but ranges within 0 .. count-1."""
    if not isinstance(ranges, list):
        raise ProtocolError("ranges of members are not a list")
    mask = 0
    for pair in ranges:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair)):
            raise ProtocolError("a range of members is not a pair of numbers")
        low, high = pair
        if not 0 <= low <= high < count:
            raise ProtocolError(f"a range of members does not lie in 0 .. {count - 1}")
        mask |= all_members(high - low + 1) << low
    return mask


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """``text`` for a terminal or a log: it is cut, and control characters but line ends and tabs become escapes."""
    shown = printable(text[:most])
    return shown if len(text) <= most else f"{shown}... ({len(text)} characters)"


def keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)  # Linux has all four, other systems some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process open this many files. Raises ClusterError if the hard limit is lower, with the fix."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ClusterError(
            f"the rendezvous store needs {wanted} open files (ulimit -n) for this job, and this process may have "
            f"{hard} at most; raise the hard limit (LimitNOFILE of the service, /etc/security/limits.conf, or the "
            "container's --ulimit nofile)"
        )
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
