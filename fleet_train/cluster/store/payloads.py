"""The data that members contribute to a barrier, and how it is combined on the way up the tree.

There are two kinds: a reduction of a step's reports, and the distinct values of the members with those who have them.
A member sends the same as a relay does for many: the header and the body that `Payload.part` gives.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fleet_train.cluster.store.wire import (
    MOST_BODY_BYTES,
    MOST_MEMBERS,
    Body,
    Fields,
    Header,
    ProtocolError,
    first_member,
    from_ranges,
    parse,
    shortened,
    to_json,
    to_ranges,
)

# The most bytes of all members together that a store holds for one barrier.
MOST_GATHERED_BYTES = 4 * MOST_BODY_BYTES
_DIFFERENT, _MOST_DIGEST = -1, (1 << 32) - 1
_INDEX = struct.Struct(">I")
_MOST_INDEX_BYTES = 16 << 20
_TIMES = struct.Struct(">I3d")


class TooLarge(Exception):
    """The values of all members together are more than a store may hold."""


class Key(NamedTuple):
    """Of a barrier."""

    group: str
    kind: str
    name: str


class Participant(Protocol):
    """A waiting connection: a member, or a relay for many."""

    def send(self, frame: bytes) -> None: ...


@dataclass(slots=True)
class Arrival:
    """A participant's message: members of it have arrived at a barrier of ``count``, with their contribution."""

    key: Key
    participant: Participant
    mask: int
    count: int
    timeout: float
    """How long they wait, in seconds."""
    calls: dict[str, int]
    """The members' calls in their scripts that led here, if they gave any: call -> members."""
    fields: Fields
    body: Body
    again: bool = False
    """Whether it has been sent before, with fewer members."""


class Payload(Protocol):
    def add(self, arrival: Arrival) -> None:
        """Add a contribution. Raises ProtocolError, TooLarge."""

    def part(self) -> tuple[Header, Body]:
        """The contribution of all that have been added, as a relay sends it to its parent."""

    def result(self) -> tuple[Header, Body]:
        """The answer to every member once all have arrived."""


@dataclass
class Reduced:
    """A step barrier: the longest step of a member (milliseconds; None: unknown for one of them), the stop request of
    the member with the lowest number, and the digest that every member gave, if all gave the same."""

    slowest: float | None = 0.0
    stop: tuple[int, str] | None = None
    digest: int | None = None
    """``_DIFFERENT`` once a member gave another one than the others, or none."""
    times: bytearray = field(default_factory=bytearray)
    """What each member says about its time so far (see ``pack_times``). It goes up to the root, and only there."""

    def add(self, arrival: Arrival) -> None:
        mask, count, fields, body = arrival.mask, arrival.count, arrival.fields, arrival.body
        longest = None if fields.header.get("slowest") is None else fields.number("slowest")
        self.slowest = None if longest is None or self.slowest is None else max(self.slowest, longest)
        stop = fields.header.get("stop")
        if stop is not None:
            asked = _read_stop(stop, count)
            self.stop = min(self.stop or asked, asked)
        has_digest = fields.header.get("digest") is not None
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
        return self._header(), bytes(self.times)

    def result(self) -> tuple[Header, Body]:
        return self._header(), b""

    def _header(self) -> Header:
        header: Header = {"slowest": self.slowest, "stop": self.stop}
        return header if self.digest in (None, _DIFFERENT) else header | {"digest": self.digest}


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
    """Of all members' values: every member gets a value of each."""
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

    def result(self) -> tuple[Header, Body]:
        return self.part()


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
