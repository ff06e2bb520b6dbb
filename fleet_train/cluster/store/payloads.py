"""The data that members contribute to a barrier, and how it is combined on the way up the tree.

There are two kinds: a reduction of a step's reports, and the distinct values of the members with those who have them.
Each can add a member's contribution or a relay's combined one, produce its own, and give the result.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fleet_train.cluster.store import members
from fleet_train.cluster.store.wire import (
    MOST_BODY_BYTES,
    Body,
    Fields,
    Header,
    Json,
    ProtocolError,
    numbers,
    parse,
    shortened,
)

# The most bytes of all members together that a store holds for one barrier.
MOST_GATHERED_BYTES = 4 * MOST_BODY_BYTES
# Values that differ are compared by their hashes; this many are also shown.
_MOST_SHOWN = 4
_MOST_DIFFERENT = 64
_OTHERS = "others"
_DIGEST_CHARACTERS = 64
_DIFFERENT, _MOST_DIGEST = -1, (1 << 32) - 1
_INDEX = struct.Struct(">I")
_MOST_INDEX_BYTES = 16 << 20
_TIMES = struct.Struct(">I3d")
# How many different calls a relay may name, and of how many characters.
_MOST_CALLS, _MOST_CALL = 64, 500


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
    is_part: bool = False
    """Whether a relay has sent it, for many."""
    again: bool = False
    """Whether it has been sent before, with fewer members."""


def read_calls(pairs: Json, count: int) -> dict[str, int]:
    """An arrival's calls, as a relay says them. Raises ProtocolError."""
    if not isinstance(pairs, list) or len(pairs) > _MOST_CALLS:
        raise ProtocolError("calls are not a list, or too many")
    calls: dict[str, int] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ProtocolError("a call is not a pair of text and members")
        calls[pair[0][:_MOST_CALL]] = members.from_ranges(pair[1], count)
    return calls


class Payload(Protocol):
    def add(self, arrival: Arrival) -> None:
        """Add a contribution. Raises ProtocolError, TooLarge."""

    def part(self) -> tuple[Header, Body]:
        """The message of a relay to its parent for all that have been added."""

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
    """What each member says about its time so far (see ``times_of``). It goes up to the root, and only there."""

    def add(self, arrival: Arrival) -> None:
        fields = arrival.fields
        longest = None if fields.header.get("slowest") is None else fields.number("slowest")
        self.slowest = None if longest is None or self.slowest is None else max(self.slowest, longest)
        stop = fields.header.get("stop")
        if stop is not None:
            asked = _read_stop(stop, arrival.count)
            self.stop = min(self.stop or asked, asked)
        has_digest = fields.header.get("digest") is not None
        digest = fields.integer("digest", 0, _MOST_DIGEST) if has_digest else _DIFFERENT
        self.digest = digest if self.digest in (None, digest) else _DIFFERENT
        if arrival.is_part:
            self.times += _whole_times(arrival.body, arrival.count)
        elif "times" in fields.header:
            self.times += _TIMES.pack(members.first(arrival.mask), *numbers(fields.header["times"], 3))
        if len(self.times) > 2 * arrival.count * _TIMES.size:  # parts that were sent again
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


def _whole_times(body: Body, count: int) -> Body:
    if len(body) % _TIMES.size or len(body) > 2 * count * _TIMES.size:
        raise ProtocolError("times of members are cut off, or of too many")
    return body


def _newest(times: bytes | bytearray) -> Iterator[tuple[float, ...]]:
    yield from {entry[0]: entry for entry in _TIMES.iter_unpack(times)}.values()


def times_of(times: bytes | bytearray) -> list[tuple[int, list[float]]]:
    """``(member, [steps, milliseconds of own work, milliseconds at barriers])`` so far, by member; entries that no
    member can have sent are left out."""
    return sorted(
        (int(member), [round(value, 2) for value in values])
        for member, *values in _newest(times)
        if member < members.MOST_MEMBERS and all(0 <= value < 1e300 and math.isfinite(value) for value in values)
    )


@dataclass
class Variant:
    """A value and its members; None stands for a value of which only the hash is kept."""

    mask: int
    value: Body | None


@dataclass
class Values:
    """The distinct values of the members, by their hashes, and who has which; an empty value counts as none.

    Of a comparison the first few are kept, and the result is who differs; otherwise all are.
    """

    is_comparison: bool = False
    variants: dict[str, Variant] = field(default_factory=dict)
    size: int = 0
    """Of all members' values, if all are kept."""
    _known: int = 0

    def add(self, arrival: Arrival) -> None:
        if arrival.is_part:
            for mask, value in unpack(arrival.body, arrival.count):
                if mask & ~arrival.mask:
                    raise ProtocolError("a part holds values of other members than declared")
                self._add(mask, value)
        elif arrival.body:
            self._add(arrival.mask, arrival.body)

    def _add(self, mask: int, value: Body | str) -> None:
        if mask & self._known:
            self._remove(mask)  # a relay sends its part again once more members have arrived
        self._known |= mask
        digest = value[:_DIGEST_CHARACTERS] if isinstance(value, str) else hashlib.sha256(value).hexdigest()
        if digest not in self.variants:
            is_kept = not self.is_comparison or len(self.variants) < _MOST_SHOWN
            if self.is_comparison and len(self.variants) >= _MOST_DIFFERENT - 1:
                digest = _OTHERS
            kept = value if is_kept and not isinstance(value, str) else None
            self.variants.setdefault(digest, Variant(0, kept))
        self.variants[digest].mask |= mask
        if not self.is_comparison:  # every member gets a value of each
            self.size += mask.bit_count() * len(value)
            if self.size > MOST_GATHERED_BYTES:
                raise TooLarge

    def _remove(self, mask: int) -> None:
        for digest, variant in list(self.variants.items()):
            self.size -= (variant.mask & mask).bit_count() * len(variant.value or b"")
            variant.mask &= ~mask
            if not variant.mask:
                del self.variants[digest]

    def part(self) -> tuple[Header, Body]:
        return {}, pack(self.variants)

    def result(self) -> tuple[Header, Body]:
        if self.is_comparison and len(self.variants) == 1:
            return {}, pack({digest: Variant(variant.mask, None) for digest, variant in self.variants.items()})
        return self.part()


def pack(variants: dict[str, Variant]) -> bytes:
    """The length of an index, the index (JSON: ``[[ranges of members, length of their value or its hash], ...]``), then
    the values."""
    index = [
        [members.ranges(variant.mask), digest if variant.value is None else len(variant.value)]
        for digest, variant in variants.items()
    ]
    head = json.dumps(index, separators=(",", ":")).encode()
    return b"".join([_INDEX.pack(len(head)), head, *(v.value for v in variants.values() if v.value is not None)])


def unpack(body: Body, count: int = members.MOST_MEMBERS) -> list[tuple[int, Body | str]]:
    """(members, their value, or its hash) of each that ``pack`` was given. Raises ProtocolError for anything else."""
    if len(body) < _INDEX.size:
        raise ProtocolError("values of members are cut off")
    (length,) = _INDEX.unpack_from(body)
    at = _INDEX.size + length
    if length > _MOST_INDEX_BYTES or at > len(body):
        raise ProtocolError("values of members are cut off, or of too many")
    index = parse(b'{"index":' + body[_INDEX.size : at] + b"}")["index"]
    if not isinstance(index, list) or len(index) > count:
        raise ProtocolError("values of too many members")
    values: list[tuple[int, Body | str]] = []
    for entry in index:
        if not (isinstance(entry, list) and len(entry) == 2):
            raise ProtocolError("a value's entry is not a pair")
        mask, length_or_digest = members.from_ranges(entry[0], count), entry[1]
        if isinstance(length_or_digest, str):
            values.append((mask, length_or_digest))
        elif type(length_or_digest) is int and 0 < length_or_digest <= len(body) - at:
            values.append((mask, body[at : at + length_or_digest]))
            at += length_or_digest
        else:
            raise ProtocolError("a value has no length")
    if at != len(body):
        raise ProtocolError("values of members have another length than declared")
    return values


KINDS: dict[str, Callable[[], Payload]] = {
    "barrier": Reduced,
    "all_gather": Values,
    "compare": lambda: Values(is_comparison=True),
}
