"""Coalesces arrivals before a busy server handles them: one wakeup for several, like interrupt coalescing.

A wakeup costs a server more than handling an arrival. If dozens arrive over many milliseconds (relays of other nodes,
each after its slowest rank), it polls at most ten times in the time that the last barriers took from the first
arrival to the last; this delays the answer by a tenth of that time at worst, and never more than 2 ms. Few
participants, or ones that arrive within a millisecond or two, are handled at once.
"""

from __future__ import annotations

import selectors
import time
from collections import deque

_MANY = 16
_LOOKS_PER_GATE = 10
_LONGEST_SECONDS = 2e-3
_SHORTEST_SECONDS = 2e-4
# The fastest of this many barriers counts: one that waited for a slow rank says nothing about the others.
_GATES = 4

Kind = tuple[str, int]
"""Barriers of one kind: their group and how many members they wait for."""


class Pace:
    """How long the server waits before it polls again: ``hold_seconds``, 0 while no barrier is open."""

    def __init__(self) -> None:
        self.hold_seconds = 0.0
        self._spreads: dict[Kind, deque[float]] = {}

    def began(self, kind: Kind) -> None:
        """The first member has arrived at a barrier."""
        spreads = self._spreads.get(kind)
        if spreads is not None and len(spreads) == _GATES:
            hold = min(min(spreads) / _LOOKS_PER_GATE, _LONGEST_SECONDS)
            self.hold_seconds = hold if hold >= _SHORTEST_SECONDS else 0.0

    def ended(self, kind: Kind, participants: int, seconds: float) -> None:
        """All of them have arrived, or none waits any more; ``seconds`` after the first one."""
        self.hold_seconds = 0.0
        if participants >= _MANY:
            self._spreads.setdefault(kind, deque(maxlen=_GATES)).append(seconds)


class PacedSelector(selectors.DefaultSelector):
    """The selector of a server's event loop, which applies that delay."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._pace.hold_seconds and (timeout is None or timeout > 0):
            time.sleep(self._pace.hold_seconds if timeout is None else min(self._pace.hold_seconds, timeout))
        return super().select(timeout)
