"""Arrivals gather for a moment before a busy server looks at them: one waking for several, as network cards do it.

To be woken costs a server more than what it is woken for. Where dozens arrive over many milliseconds (relays of other
nodes, each after its slowest rank) it looks at most ten times in the time that the last barriers took from the first
arrival to the last; the answer comes a tenth of that time later at worst, and never more than 2 ms. Few participants,
or such that arrive within a millisecond or two, are heard at once.
"""

from __future__ import annotations

import selectors
import time
from collections import deque

_MANY = 16
_LOOKS_PER_GATE = 10
_LONGEST_SECONDS = 2e-3
_SHORTEST_SECONDS = 2e-4
# The quickest of so many barriers counts: one that waited for a slow rank says nothing of the others.
_GATES = 4

Kind = tuple[str, int]
"""Barriers of one kind: their group and how many members they wait for."""


class Pace:
    """How long the server waits before it looks again: ``hold_seconds``, 0 while nobody is waited for."""

    def __init__(self) -> None:
        self.hold_seconds = 0.0
        self._spreads: dict[Kind, deque[float]] = {}

    def began(self, kind: Kind) -> None:
        """The first has arrived at a barrier."""
        spreads = self._spreads.get(kind)
        if spreads is not None and len(spreads) == _GATES:
            hold = min(min(spreads) / _LOOKS_PER_GATE, _LONGEST_SECONDS)
            self.hold_seconds = hold if hold >= _SHORTEST_SECONDS else 0.0

    def ended(self, kind: Kind, participants: int, seconds: float) -> None:
        """All of them have arrived, or nobody waits any more; ``seconds`` after the first one."""
        self.hold_seconds = 0.0
        if participants >= _MANY:
            self._spreads.setdefault(kind, deque(maxlen=_GATES)).append(seconds)


class PacedSelector(selectors.DefaultSelector):
    """The selector of a server's event loop, which keeps that pace."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._pace.hold_seconds and (timeout is None or timeout > 0):
            time.sleep(self._pace.hold_seconds if timeout is None else min(self._pace.hold_seconds, timeout))
        return super().select(timeout)
