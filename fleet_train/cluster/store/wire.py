"""What members and servers of the rendezvous store send: frames over TCP, each with a header and a body.

A frame is two lengths (unsigned, 32 bits, big endian), a header (a JSON object of a few fields, checked one by one) and
a body that the store keeps and forwards unchanged, without parsing it. No pickle. The first bytes of another protocol
are lengths beyond every limit, so its connection ends at once. Sets of members are ranges in a header, and integers
with one bit per member in memory: ten thousand members are 1.25 KB, and a union is one operation.

What members contribute to a barrier is combined on the way up the tree. There are two kinds: a reduction of a step's
reports, and the distinct values of the members with those who have them. A member sends the same as a relay does for
many: the header and the body that `Payload.part` gives.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fleet_train.errors import ClusterError, printable

Json = Any
Header = dict[str, Any]
Body = bytes

VERSION = 4
"""The version of the protocol; a server names it first, and all members of a job have the same."""
LENGTHS = struct.Struct(">II")
# Before a connection is authenticated, then after.
STRANGERS_BYTES = 4096
MOST_HEADER_BYTES = 1 << 18
MOST_BODY_BYTES = 64 << 20
MOST_TEXT = 2000
MOST_NAME = 500
MOST_MEMBERS = 1 << 17
"""A bound for untrusted input; Paddle's own limits are far lower."""

# The most bytes of all members together that a store holds for one barrier.
MOST_GATHERED_BYTES = 4 * MOST_BODY_BYTES
# How many different calls a relay may name, and of how many characters.
_MOST_CALLS, _MOST_CALL = 64, 500
_DIFFERENT, _MOST_DIGEST = -1, (1 << 32) - 1
_INDEX = struct.Struct(">I")
_MOST_INDEX_BYTES = 16 << 20
_TIMES = struct.Struct(">I3d")
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


def parse(header: Body) -> Fields:
    """The header of a frame. Raises ProtocolError unless it is a JSON object of bounded depth and numbers."""
    try:
        text = header.decode()
        parsed, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        raise ProtocolError("a header is not JSON") from None
    if not isinstance(parsed, dict) or end != len(text):
        raise ProtocolError("a header is not a JSON object")
    return Fields(parsed)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class Fields(dict[str, Any]):
    """A header whose fields are read by name, type and bounds. Each raises ProtocolError naming the field."""

    def text(self, name: str, default: str | None = None, most: int = MOST_TEXT) -> str:
        value = self.get(name, default)
        if not isinstance(value, str) or len(value) > most:
            raise ProtocolError(f"{name} is not a text of at most {most} characters")
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            raise ProtocolError(f"{name} is not a whole number from {least} to {most}")
        return value

    def number(self, name: str, most: float = 1e12) -> float:
        """Read a field that is a number from 0 to ``most``."""
        value: Any = self.get(name)
        if type(value) not in (int, float) or not 0 <= value <= most:
            raise ProtocolError(f"{name} is not a number from 0 to {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        return self.get(name) is True

    def optional_seconds(self, name: str) -> float | None:
        return None if self.get(name) is None else max(0.05, self.number(name, 1e7))


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


class TooLarge(Exception):
    """The values of all members together are more than a store may hold."""


class Key(NamedTuple):
    """The key of a barrier."""

    group: str
    kind: str
    name: str


class StoreParticipant(Protocol):
    """A waiting connection: a member, or a relay for many."""

    def send(self, frame: bytes) -> None: ...


@dataclass(slots=True)
class Arrival:
    """A participant's message: members of it have arrived at a barrier of ``count``, with their contribution."""

    key: Key
    participant: StoreParticipant
    mask: int
    count: int
    timeout: float
    """How long the members wait, in seconds."""
    calls: dict[str, int]
    """The members' calls in their scripts that led here, if they gave any: call -> members."""
    fields: Fields
    body: Body
    again: bool = False
    """Whether the arrival has been sent before, with fewer members."""

    @classmethod
    def read(cls, fields: Fields, body: Body, participant: StoreParticipant, own: tuple[str, int] | None) -> Arrival:
        """Read an arrival. ``own``: the participant's group and number if it is a member, the only one of its own; a
        relay names the members that it speaks for, and their group. Raises ProtocolError."""
        if own and not fields.keys().isdisjoint(("members", "group", "again")):
            raise ProtocolError("a member speaks for another")
        group, members = (own[0], [[own[1], own[1]]]) if own else (fields.text("group", most=MOST_NAME), None)
        count = fields.integer("count", 1, MOST_MEMBERS)
        mask = from_ranges(fields.get("members", members), count)
        if not mask:
            raise ProtocolError("a part without members")
        key = Key(group, fields["do"], fields.text("name", most=MOST_NAME))
        timeout, calls = fields.number("timeout", 1e7), _read_calls(fields.get("calls", []), mask)
        return cls(key, participant, mask, count, timeout, calls, fields, body, fields.flag("again"))


def _read_calls(pairs: Json, members: int) -> dict[str, int]:
    if not isinstance(pairs, list) or len(pairs) > _MOST_CALLS:
        raise ProtocolError("calls are not a list, or too many")
    calls: dict[str, int] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and pair[0]):
            raise ProtocolError("a call is not a pair of text and members")
        calls[pair[0][:_MOST_CALL]] = mask = from_ranges(pair[1])
        if mask & ~members:
            raise ProtocolError("a call of other members than declared")
    return calls


class Payload(Protocol):
    def add(self, arrival: Arrival) -> None:
        """Add a contribution. Raises ProtocolError, TooLarge."""

    def part(self) -> tuple[Header, Body]:
        """The contribution of all that have been added: to a relay's parent, or once all have arrived to all."""


@dataclass
class Reduced:
    """A step barrier: the longest step of a member (milliseconds; None: unknown for one of them), the stop request of
    the member with the lowest number, and the digest that every member gave, if all gave the same."""

    slowest: float | None = 0.0
    stop: tuple[int, str] | None = None
    digest: int | None = None
    """The digest that all members gave; ``_DIFFERENT`` once a member gave another one than the others, or none."""
    times: bytearray = field(default_factory=bytearray)
    """What each member says about its time so far (see ``pack_times``). It goes up to the root, and only there."""

    def add(self, arrival: Arrival) -> None:
        mask, count, fields, body = arrival.mask, arrival.count, arrival.fields, arrival.body
        longest = None if fields.get("slowest") is None else fields.number("slowest")
        self.slowest = None if longest is None or self.slowest is None else max(self.slowest, longest)
        stop = fields.get("stop")
        if stop is not None:
            asked = _read_stop(stop, count)
            self.stop = min(self.stop or asked, asked)
        has_digest = fields.get("digest") is not None
        digest = fields.integer("digest", 0, _MOST_DIGEST) if has_digest else _DIFFERENT
        self.digest = digest if self.digest in (None, digest) else _DIFFERENT
        if len(body) % _TIMES.size or len(body) > 2 * count * _TIMES.size:
            raise ProtocolError("times of members are cut off, or of too many")
        if not mask & (mask - 1) and any(member != first_member(mask) for member, *_ in _TIMES.iter_unpack(body)):
            raise ProtocolError("a member sends times of another")
        self.times += body
        if len(self.times) > 2 * count * _TIMES.size:  # parts that were sent again
            self.times = bytearray().join(_TIMES.pack(*entry) for entry in _newest(self.times))

    def part(self) -> tuple[Header, Body]:
        header: Header = {"slowest": self.slowest, "stop": self.stop}
        if self.digest not in (None, _DIFFERENT):
            header["digest"] = self.digest
        return header, bytes(self.times)


def _read_stop(value: object, count: int) -> tuple[int, str]:
    if not (isinstance(value, list) and len(value) == 2 and type(value[0]) is int and isinstance(value[1], str)):
        raise ProtocolError("a stop is not a pair of member and reason")
    if not 0 <= value[0] < count:
        raise ProtocolError("a stop is requested by a process that is not a member")
    return value[0], shortened(value[1])


def pack_times(member: int, times: Sequence[float]) -> Body:
    """A member's sums so far: steps, milliseconds of own work, milliseconds at barriers."""
    return _TIMES.pack(member, *times)


def unpack_times(times: bytes | bytearray) -> list[tuple[int, list[float]]]:
    """``(member, its sums)`` by member, the newest of each; entries that no member can have sent are left out."""
    return sorted(
        (int(member), [round(value, 2) for value in values])
        for member, *values in _newest(times)
        if member < MOST_MEMBERS and all(0 <= value < 1e300 and math.isfinite(value) for value in values)
    )


def _newest(times: bytes | bytearray) -> Iterator[tuple[float, ...]]:
    yield from {entry[0]: entry for entry in _TIMES.iter_unpack(times)}.values()


@dataclass
class Values:
    """The distinct values of the members, and who has which."""

    masks: dict[Body, int] = field(default_factory=dict)
    """A value -> the members that have it."""
    size: int = 0
    """The bytes of all members' values: every member gets a value of each."""
    _known: int = 0

    def add(self, arrival: Arrival) -> None:
        for mask, value in unpack(arrival.body, arrival.count):
            if mask & ~arrival.mask:
                raise ProtocolError("a part holds values of other members than declared")
            if mask & self._known:
                self._remove(mask)  # a relay sends its part again once more members have arrived
            self._known |= mask
            self.masks[value] = self.masks.get(value, 0) | mask
            self.size += mask.bit_count() * len(value)
            if self.size > MOST_GATHERED_BYTES:
                raise TooLarge

    def _remove(self, members: int) -> None:
        for value, mask in list(self.masks.items()):
            self.size -= (mask & members).bit_count() * len(value)
            self.masks[value] = mask & ~members
            if not self.masks[value]:
                del self.masks[value]

    def part(self) -> tuple[Header, Body]:
        return {}, pack(self.masks)


def pack(masks: Mapping[Body, int]) -> Body:
    """The length of an index, the index (JSON: ``[[ranges of members, length of their value], ...]``), and the values;
    ``masks``: each value's members."""
    index = to_json([[to_ranges(mask), len(value)] for value, mask in masks.items()])
    return b"".join([_INDEX.pack(len(index)), index, *masks])


def unpack(body: Body, count: int = MOST_MEMBERS) -> list[tuple[int, Body]]:
    """``(members, their value)`` of what ``pack`` was given; nothing for an empty body. Raises ProtocolError."""
    if not body:
        return []
    if len(body) < _INDEX.size:
        raise ProtocolError("values of members are cut off")
    (length,) = _INDEX.unpack_from(body)
    at = _INDEX.size + length
    if length > _MOST_INDEX_BYTES or at > len(body):
        raise ProtocolError("values of members are cut off, or of too many")
    index = parse(b'{"index":' + body[_INDEX.size : at] + b"}")["index"]
    if not isinstance(index, list) or len(index) > count:
        raise ProtocolError("values of too many members")
    values: list[tuple[int, Body]] = []
    for entry in index:
        if not (isinstance(entry, list) and len(entry) == 2):
            raise ProtocolError("a value's entry is not a pair")
        mask, length = from_ranges(entry[0], count), entry[1]
        if type(length) is not int or not 0 < length <= len(body) - at:
            raise ProtocolError("a value has no length")
        values.append((mask, body[at : at + length]))
        at += length
    if at != len(body):
        raise ProtocolError("values of members have another length than declared")
    return values


KINDS: dict[str, Callable[[], Payload]] = {"barrier": Reduced, "all_gather": Values, "compare": Values}
