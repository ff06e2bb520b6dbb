"""The data that members contribute to a barrier, and how it is combined on the way up the tree.

Each kind can add a member's contribution or a relay's combined one, produce its own, and give the result: a
reduction, the values of all, the value of one, or the members whose values differ. Bodies are never parsed here.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from fleet_train.cluster.store import members
from fleet_train.cluster.store.wire import (
    MOST_BODY_BYTES,
    Body,
    Fields,
    Header,
    Json,
    ProtocolError,
    numbers,
    printable,
)

# The most bytes of all members together that a store holds for one barrier.
MOST_GATHERED_BYTES = 4 * MOST_BODY_BYTES
# Values that differ are compared by their hashes; this many are also shown.
_MOST_SHOWN = 4
_MOST_DIFFERENT = 64
_DIFFERENT, _MOST_DIGEST = -1, (1 << 32) - 1
_COUNT = struct.Struct(">I")
_ENTRY = struct.Struct(">II")


class TooLarge(Exception):
    """The values of all members together are more than a store may hold."""


@dataclass(slots=True)
class Word:
    """The contribution of the members of ``mask`` to a barrier of ``count``: one member's, or a relay's for many."""

    mask: int
    count: int
    fields: Fields
    body: Body

    @property
    def is_part(self) -> bool:
        return self.fields.flag("part")


class Payload(Protocol):
    def add(self, word: Word) -> None:
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

    def add(self, word: Word) -> None:
        told = None if word.fields.header.get("slowest") is None else word.fields.number("slowest")
        self.slowest = None if told is None or self.slowest is None else max(self.slowest, told)
        stop = word.fields.header.get("stop")
        if stop is not None:
            asked = _read_stop(stop, word.count)
            self.stop = min(self.stop or asked, asked)
        has_digest = word.fields.header.get("digest") is not None
        digest = word.fields.integer("digest", 0, _MOST_DIGEST) if has_digest else _DIFFERENT
        self.digest = digest if self.digest in (None, digest) else _DIFFERENT

    def part(self) -> tuple[Header, Body]:
        header: Header = {"slowest": self.slowest, "stop": self.stop}
        return (header if self.digest in (None, _DIFFERENT) else header | {"digest": self.digest}), b""

    def result(self) -> tuple[Header, Body]:
        return self.part()


def _read_stop(told: object, count: int) -> tuple[int, str]:
    if not (isinstance(told, list) and len(told) == 2 and type(told[0]) is int and isinstance(told[1], str)):
        raise ProtocolError("a stop is not a pair of member and reason")
    if not 0 <= told[0] < count:
        raise ProtocolError("a stop is requested by a process that is not a member")
    return told[0], printable(told[1])


@dataclass
class Gathered:
    """The values of all members."""

    values: dict[int, Body] = field(default_factory=dict)
    size: int = 0

    def add(self, word: Word) -> None:
        values = _unpack(word.body, word.mask) if word.is_part else {members.first(word.mask): word.body}
        for member, value in values.items():
            self.size += len(value) - len(self.values.get(member, b""))
            self.values[member] = value
        if self.size > MOST_GATHERED_BYTES:
            raise TooLarge

    def part(self) -> tuple[Header, Body]:
        return {}, pack(self.values)

    def result(self) -> tuple[Header, Body]:
        return self.part()


def pack(values: dict[int, Body]) -> bytes:
    """A count, (member, size) of each, then the values."""
    index = b"".join(_ENTRY.pack(member, len(value)) for member, value in sorted(values.items()))
    return b"".join([_COUNT.pack(len(values)), index, *(values[member] for member in sorted(values))])


def unpack(body: Body) -> dict[int, Body]:
    """Decodes the output of ``pack``. Raises ProtocolError for anything else."""
    try:
        (count,) = _COUNT.unpack_from(body)
        if count > members.MOST_MEMBERS:
            raise ProtocolError("values of too many members")
        entries = [_ENTRY.unpack_from(body, _COUNT.size + i * _ENTRY.size) for i in range(count)]
    except struct.error:
        raise ProtocolError("values of members are cut off") from None
    at = _COUNT.size + count * _ENTRY.size
    values = {}
    for member, size in entries:
        values[member] = body[at : at + size]
        at += size
    if at != len(body):
        raise ProtocolError("values of members have another length than declared")
    return values


def _unpack(body: Body, mask: int) -> dict[int, Body]:
    values = unpack(body)
    if set(values) != set(members.each(mask)):
        raise ProtocolError("a part holds values of other members than declared")
    return values


@dataclass
class Chosen:
    """One member's value for all."""

    source: int = -1
    value: Body | None = None

    def add(self, word: Word) -> None:
        source = word.fields.integer("source", 0, word.count - 1)
        if self.source not in (-1, source):
            raise ProtocolError("members disagree on whose value is meant")
        self.source = source
        if word.mask >> source & 1:
            self.value = word.body

    def part(self) -> tuple[Header, Body]:
        return {"source": self.source}, self.value or b""

    def result(self) -> tuple[Header, Body]:
        return self.part()


@dataclass
class Variant:
    """A value and its members. Beyond the first few, values are represented by their hashes only."""

    mask: int
    value: Body | None


@dataclass
class Compared:
    """Whether all members have the same value; if not, which member has which."""

    variants: dict[str, Variant] = field(default_factory=dict)
    DIGEST_CHARACTERS: ClassVar[int] = 64

    def add(self, word: Word) -> None:
        if not word.is_part:
            self._take(hashlib.sha256(word.body).hexdigest(), word.mask, word.body)
            return
        told = word.fields.header.get("variants")
        if not isinstance(told, list) or len(told) > _MOST_DIFFERENT:
            raise ProtocolError("variants are not a list, or too many")
        values = unpack(word.body)
        for index, variant in enumerate(told):
            if not (isinstance(variant, list) and len(variant) == 2 and isinstance(variant[0], str)):
                raise ProtocolError("a variant is not a pair of hash and members")
            digest, who = variant
            self._take(digest[: self.DIGEST_CHARACTERS], members.from_ranges(who, word.count), values.get(index))

    def _take(self, digest: str, mask: int, value: Body | None) -> None:
        for other in self.variants.values():
            other.mask &= ~mask  # a relay sends its part again once more members have arrived
        if digest in self.variants:
            self.variants[digest].mask |= mask
            return
        if len(self.variants) >= _MOST_DIFFERENT - 1:
            digest, value = "others", None
        shown = value if len(self.variants) < _MOST_SHOWN else None
        self.variants.setdefault(digest, Variant(0, shown)).mask |= mask

    def part(self) -> tuple[Header, Body]:
        told = [[digest, members.ranges(variant.mask)] for digest, variant in self.variants.items()]
        shown = {i: v.value for i, v in enumerate(self.variants.values()) if v.value is not None}
        return {"variants": told}, pack(shown)

    def result(self) -> tuple[Header, Body]:
        return ({"same": True}, b"") if len(self.variants) == 1 else self.part()


KINDS: dict[str, type[Reduced] | type[Gathered] | type[Chosen] | type[Compared]] = {
    "barrier": Reduced,
    "all_gather": Gathered,
    "broadcast": Chosen,
    "compare": Compared,
}


# How long each member worked and waited, kept by the member's server until it is requested.
#
# Barriers transfer only reductions. The members' reports at a step barrier are summed by the server that they are
# connected to, once that barrier is complete; the root collects the sums on request (``rounds.py``).


Told = dict[int, list[float]]
# Steps, milliseconds of own work, milliseconds at barriers.
_NUMBERS = 3
# A reader between two barriers may be this many of them behind.
_KEPT = 8


class Times:
    """Sums by member for one group. Barriers are numbered from 1 in the order of their completion."""

    def __init__(self) -> None:
        self.completed = 0
        self._sums: Told = {}
        self._last: deque[tuple[int, Told]] = deque(maxlen=_KEPT)

    def add(self, told: Told) -> int:
        """A barrier is complete, and these members of it are connected here; returns its number."""
        self.completed += 1
        for member, values in told.items():
            sums = self._sums.setdefault(member, [0.0] * _NUMBERS)
            self._sums[member] = [a + b for a, b in zip(sums, values, strict=True)]
        self._last.append((self.completed, told))
        return self.completed

    def up_to(self, number: int) -> Told:
        """The sums of all barriers up to that number, of the members that are connected here."""
        later = [told for each, told in self._last if each > number]
        return {member: self._without(member, sums, later) for member, sums in self._sums.items()}

    def _without(self, member: int, sums: list[float], later: list[Told]) -> list[float]:
        for told in later:
            sums = [a - b for a, b in zip(sums, told.get(member, [0.0] * _NUMBERS), strict=True)]
        return [round(value, 2) for value in sums]


def read_times(value: Json) -> list[float]:
    """A member's report at a barrier. Raises ProtocolError."""
    values = numbers(value, _NUMBERS)
    if min(values) < 0:
        raise ProtocolError("a time is negative")
    return values


def read_many_times(value: Json, count: int) -> Told:
    """A relay's word: ``[[member, [steps, busy, waiting]], ...]``. Raises ProtocolError."""
    if not isinstance(value, list) or len(value) > count:
        raise ProtocolError("times of members are not a list, or of too many")
    told: Told = {}
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and 0 <= pair[0] < count):
            raise ProtocolError("times of a member are not a pair of its number and its times")
        told[pair[0]] = numbers(pair[1], _NUMBERS)
    return told
