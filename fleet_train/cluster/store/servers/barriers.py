"""Barriers of one rendezvous round: which members have arrived, which wait for an answer, and until when.

The server at the root and every relay keep the same state; what they do with a barrier differs (``rounds.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fleet_train.cluster.store.protocol import members
from fleet_train.cluster.store.protocol.payloads import KINDS, Payload, TooLarge, Word
from fleet_train.cluster.store.protocol.times import Told
from fleet_train.cluster.store.protocol.wire import Body, Fields, Header, ProtocolError, encode
from fleet_train.cluster.store.servers.pace import Pace

# A timer that fires this much early still counts: clocks of two machines are not more exact.
_SLACK_SECONDS = 0.02


class Participant(Protocol):
    """A waiting connection: a member, or a relay for many."""

    def send(self, frame: bytes) -> None: ...


class Key(NamedTuple):
    group: str
    kind: str
    name: str


@dataclass
class Waiter:
    """``mask``: its members; ``deadline``: on the loop's clock."""

    mask: int
    deadline: float


@dataclass(slots=True)
class Arrival:
    """A participant's message: members of it have arrived at a barrier, and wait for this many seconds at most."""

    key: Key
    participant: Participant
    mask: int
    count: int
    timeout: float
    calls: dict[str, int]
    """The members' calls in their scripts that led here, if they gave any: call -> members."""
    fields: Fields
    body: Body
    times: Told
    """A member's report about itself, if it gave one."""
    again: bool
    """A relay's part, sent again with more members than before."""


@dataclass
class Barrier:
    """A barrier that has not been answered yet."""

    key: Key
    count: int
    first: int
    payload: Payload
    began: float
    """When the first arrived, on the loop's clock."""
    arrived: int = 0
    withdrawn: int = 0
    """Arrived, and left after their own timeout: not responsible if others arrived shortly after them."""
    calls: dict[str, int] = field(default_factory=dict)
    waiters: dict[Participant, Waiter] = field(default_factory=dict)
    times: Told = field(default_factory=dict)
    """The reports of members that are connected here."""
    timer: asyncio.TimerHandle | None = None
    too_large: bool = False

    @property
    def missing(self) -> int:
        return members.all_of(self.count) & ~self.arrived

    @property
    def blamed(self) -> int:
        return self.missing & ~self.withdrawn

    def take(self, arrival: Arrival, now: float) -> None:
        """Raises ProtocolError, TooLarge for the members' data; then they have not arrived."""
        self.payload.add(Word(arrival.mask, self.count, arrival.fields, arrival.body))
        self.arrived |= arrival.mask
        self.withdrawn &= ~arrival.mask
        self.times |= arrival.times
        for call, mask in arrival.calls.items():
            self.calls[call] = self.calls.get(call, 0) | mask
        self.waiters[arrival.participant] = Waiter(arrival.mask, now + arrival.timeout)

    def answer(self, frame: bytes) -> None:
        """The same bytes for all."""
        for participant in self.waiters:
            participant.send(frame)
        self.waiters.clear()

    def frame(self, header: Header, body: Body = b"") -> bytes:
        return encode({**header, "to": list(self.key)}, body)


class Barriers:
    """All barriers of a round. ``on_timeout`` is called with those whose timeout plus ``grace_seconds`` has expired."""

    def __init__(
        self, on_timeout: Callable[[Barrier, list[Participant]], None], grace_seconds: float, pace: Pace
    ) -> None:
        self.pending: dict[Key, Barrier] = {}
        self._on_timeout = on_timeout
        self._grace_seconds = grace_seconds
        self._pace = pace

    def take(self, arrival: Arrival, now: float) -> Barrier | None:
        """The barrier of an arrival, created by the first one; None if the arrival no longer counts.

        Raises ProtocolError for its data. If that is more than can be held, the barrier is ``too_large``.
        """
        barrier = self._of(arrival, now)
        if arrival.again and arrival.participant not in barrier.waiters:
            self._close_if_idle(barrier)
            return None  # it crossed our answer
        try:
            barrier.take(arrival, now)
        except ProtocolError:
            self._close_if_idle(barrier)
            raise
        except TooLarge:
            barrier.too_large = True
            barrier.waiters[arrival.participant] = Waiter(arrival.mask, now)
        return barrier

    def _of(self, arrival: Arrival, now: float) -> Barrier:
        barrier = self.pending.get(arrival.key)
        if barrier is None:
            payload = KINDS[arrival.key.kind]()
            barrier = Barrier(arrival.key, arrival.count, members.first(arrival.mask), payload, now)
            self.pending[arrival.key] = barrier
            self._pace.began((arrival.key.group, arrival.count))
        return barrier

    def arm(self, barrier: Barrier, deadline: float) -> None:
        """One timer per barrier, at the earliest deadline of its waiters."""
        due = deadline + self._grace_seconds
        if barrier.timer is None or due < barrier.timer.when():
            if barrier.timer is not None:
                barrier.timer.cancel()
            barrier.timer = asyncio.get_running_loop().call_at(due, self._fire, barrier)

    def _fire(self, barrier: Barrier) -> None:
        barrier.timer = None
        if self.pending.get(barrier.key) is not barrier:
            return
        over = asyncio.get_running_loop().time() + _SLACK_SECONDS - self._grace_seconds
        self._on_timeout(barrier, [who for who, waiter in barrier.waiters.items() if waiter.deadline <= over])
        if self.pending.get(barrier.key) is barrier:
            self.arm(barrier, min(waiter.deadline for waiter in barrier.waiters.values()))

    def withdraw(self, barrier: Barrier, participant: Participant) -> None:
        """Its timeout has expired: it no longer counts as arrived, so that a later use of this barrier starts clean."""
        waiter = barrier.waiters.pop(participant)
        barrier.withdrawn |= waiter.mask
        barrier.arrived &= ~waiter.mask
        self._close_if_idle(barrier)

    def forget(self, participant: Participant) -> None:
        """Its connection has ended: its data stays while others wait."""
        for barrier in list(self.pending.values()):
            if barrier.waiters.pop(participant, None) is not None:
                self._close_if_idle(barrier)

    def _close_if_idle(self, barrier: Barrier) -> None:
        if not barrier.waiters:
            self.close(barrier)

    def close(self, barrier: Barrier) -> None:
        if barrier.timer is not None:
            barrier.timer.cancel()
            barrier.timer = None
        if self.pending.get(barrier.key) is barrier:
            del self.pending[barrier.key]
            seconds = asyncio.get_running_loop().time() - barrier.began
            self._pace.ended((barrier.key.group, barrier.count), len(barrier.waiters), seconds)

    def of_group(self, group: str) -> list[Barrier]:
        return [barrier for key, barrier in self.pending.items() if key.group == group]
