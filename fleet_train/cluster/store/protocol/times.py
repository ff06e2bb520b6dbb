"""How long each member worked and waited, kept by the member's server until it is requested.

Barriers transfer only reductions. The members' reports at a step barrier are summed by the server that they are
connected to, once that barrier is complete; the root collects the sums on request (``rounds.py``).
"""

from __future__ import annotations

from collections import deque

from fleet_train.cluster.store.protocol.wire import Json, ProtocolError, numbers

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


def read(value: Json) -> list[float]:
    """A member's report at a barrier. Raises ProtocolError."""
    values = numbers(value, _NUMBERS)
    if min(values) < 0:
        raise ProtocolError("a time is negative")
    return values


def read_many(value: Json, count: int) -> Told:
    """A relay's word: ``[[member, [steps, busy, waiting]], ...]``. Raises ProtocolError."""
    if not isinstance(value, list) or len(value) > count:
        raise ProtocolError("times of members are not a list, or of too many")
    told: Told = {}
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and 0 <= pair[0] < count):
            raise ProtocolError("times of a member are not a pair of its number and its times")
        told[pair[0]] = numbers(pair[1], _NUMBERS)
    return told
