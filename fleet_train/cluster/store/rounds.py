"""One rendezvous round: stored values, departed members, reported failures, and which members wait where.

A restarted job uses a new round, at the same port, so that nothing of a failed attempt is visible to the next.
The round is kept at the root of the tree; a relay (``relay.py``) keeps the same state for its own members and asks
its parent. Used by the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from fleet_train.cluster.store import members
from fleet_train.cluster.store.members import Pace
from fleet_train.cluster.store.payloads import KINDS, Payload, Times, Told, TooLarge, Word
from fleet_train.cluster.store.reports import MOST_REPORTS, checked_report
from fleet_train.cluster.store.wire import Body, Fields, Header, ProtocolError, encode, printable

# How long all members may wait at different barriers before that counts as an error and not as a coincidence.
_CROSSED_SECONDS = 1.0
# How many bytes members may store under keys, and how long a key may be.
_MOST_STORED_BYTES = 64 << 20
_MOST_KEYS = 1 << 18
MOST_NAME = 500

Reply = Callable[[Header, Body], None]
Pull = Callable[[str, int], "asyncio.Future[Told]"]
"""Request a relay's members' times: group, up to which barrier."""


class Round(ABC):
    """A session's interface to a round, wherever its root is."""

    def __init__(self, clock: Callable[[], float], pace: Pace, grace_seconds: float = 0.0) -> None:
        self.clock = clock
        self.barriers = Barriers(self._on_timeout, grace_seconds, pace)
        self.times: dict[str, Times] = {}
        self.pulls: dict[Participant, Pull] = {}
        """Of the relays that are connected here."""

    @abstractmethod
    def arrive(self, arrival: Arrival) -> None: ...

    @abstractmethod
    def ask(self, request: Header, body: Body, reply: Reply) -> None:
        """Execute a request that does not wait for other members; raises ProtocolError, or calls ``reply`` once."""

    @abstractmethod
    def depart(self, group: str, mask: int, how: str) -> None:
        """Members have departed: ``left``, or how they were lost."""

    @abstractmethod
    def _on_timeout(self, barrier: Barrier, late: list[Participant]) -> None: ...

    def complete(self, barrier: Barrier) -> int:
        """Add up the members' reports at a step barrier; returns its number in the round's order."""
        return self.times.setdefault(barrier.key.group, Times()).add(barrier.times)

    async def collect_times(self, group: str, number: int) -> Told:
        """The sums of this server's members and of all below it, up to the barrier of that number."""
        told = self.times.setdefault(group, Times()).up_to(number)
        pulls = [pull(group, number) for pull in list(self.pulls.values())]
        for answer in await asyncio.gather(*pulls, return_exceptions=True):
            if isinstance(answer, dict):  # a lost relay does not answer; its loss is reported elsewhere
                told |= answer
        return told


class Root(Round):
    """The round itself."""

    def __init__(self, clock: Callable[[], float], pace: Pace) -> None:
        super().__init__(clock, pace)
        self.present: dict[str, dict[int, str]] = {}
        """By group: member -> its machine."""
        self._began = clock()
        self._values: dict[str, Body] = {}
        self._stored_bytes = 0
        self._gone: dict[str, dict[int, str]] = {}
        self._reports: list[tuple[Any, float]] = []
        self._is_looking: set[str] = set()

    @property
    def seconds(self) -> float:
        return round(self.clock() - self._began, 3)

    # barriers

    def arrive(self, arrival: Arrival) -> None:
        barrier = self.barriers.take(arrival, self.clock())
        if barrier is None:
            return
        if barrier.too_large:
            self._finish(barrier, {"error": "large"})
        elif barrier.count != arrival.count:
            counts = [[barrier.first, barrier.count], [members.first(arrival.mask), arrival.count]]
            self._finish(barrier, {"error": "count", "counts": counts})
        elif not barrier.missing:
            self._finish(barrier, *barrier.payload.result())
        elif not self._give_up_if_hopeless(barrier):
            self.barriers.arm(barrier, barrier.waiters[arrival.participant].deadline)
            self._look_for_crossed(arrival.key.group)

    def _finish(self, barrier: Barrier, header: Header, body: Body = b"") -> None:
        if "error" not in header:
            header["number"] = self.complete(barrier) if barrier.key.kind == "barrier" else 0
        self.barriers.close(barrier)
        barrier.answer(barrier.frame(header, body))

    def _give_up_if_hopeless(self, barrier: Barrier) -> bool:
        if self._reports:
            self._finish(barrier, {"error": "failed"}, json.dumps(self._reports[0][0]).encode())
            return True
        gone = self._gone.get(barrier.key.group, {})
        lost = [member for member in gone if barrier.missing >> member & 1] if gone else []
        if lost:
            call = next(filter(None, barrier.calls), "")
            self._finish(barrier, {"error": "gone", "call": call}, _by_reason({m: gone[m] for m in lost}))
        return bool(lost)

    def review(self) -> None:
        """Answer every barrier that can no longer be complete."""
        for barrier in list(self.barriers.pending.values()):
            self._give_up_if_hopeless(barrier)

    def _look_for_crossed(self, group: str) -> None:
        if len(self.barriers.pending) > 1 and group not in self._is_looking and len(self.barriers.of_group(group)) > 1:
            self._is_looking.add(group)
            asyncio.get_running_loop().call_later(_CROSSED_SECONDS, self._give_up_if_crossed, group)

    def _give_up_if_crossed(self, group: str) -> None:
        """All members wait, but at different barriers, so none can complete: report which member waits where."""
        self._is_looking.discard(group)
        pending = self.barriers.of_group(group)
        waiting = 0
        for barrier in pending:
            waiting |= barrier.arrived
        if len(pending) < 2 or waiting != members.all_of(max(barrier.count for barrier in pending)):
            self._look_for_crossed(group)
            return
        where = [
            [members.ranges(mask & barrier.arrived), barrier.key.name, call]
            for barrier in pending
            for call, mask in barrier.calls.items()
        ]
        for barrier in pending:
            self._finish(barrier, {"error": "crossed"}, json.dumps(where).encode())

    def _on_timeout(self, barrier: Barrier, late: list[Participant]) -> None:
        """They are withdrawn, so that a later use of this barrier starts clean; the others continue to wait."""
        frame = barrier.frame({"error": "timeout", "missing": members.ranges(barrier.blamed)})
        for participant in late:
            self.barriers.withdraw(barrier, participant)
            participant.send(frame)

    # requests that do not wait

    def ask(self, request: Header, body: Body, reply: Reply) -> None:
        fields = Fields(request)
        handler = self._HANDLERS.get(fields.text("do", most=20))
        if handler is None:
            raise ProtocolError("an unknown request")
        handler(self, fields, body, reply)

    def _set(self, fields: Fields, body: Body, reply: Reply) -> None:
        reply({} if self.put(fields.text("key", most=MOST_NAME), body) else {"error": "full"}, b"")

    def put(self, key: str, body: Body) -> bool:
        """Whether there was room for it; where not, what was there before stays."""
        stored = self._stored_bytes + len(body) - len(self._values.get(key, b""))
        keys = len(self._values) + (key not in self._values)
        if stored > _MOST_STORED_BYTES or keys > _MOST_KEYS:
            return False
        self._stored_bytes, self._values[key] = stored, body
        return True

    def _get(self, fields: Fields, _: Body, reply: Reply) -> None:
        reply({}, self._values.get(fields.text("key", most=MOST_NAME), b""))

    def _keys(self, fields: Fields, _: Body, reply: Reply) -> None:
        prefix = fields.text("prefix", most=MOST_NAME)
        reply({}, json.dumps([key for key in self._values if key.startswith(prefix)]).encode())

    def _fail(self, _: Fields, body: Body, reply: Reply) -> None:
        report = checked_report(body)
        if len(self._reports) < MOST_REPORTS:
            self._reports.append((report, self.seconds))
        if len(self._reports) == 1:
            self.review()
        reply({}, b"")

    def _failures(self, fields: Fields, _: Body, reply: Reply) -> None:
        """The reports that are new to the caller: it knows this many already."""
        reply({}, json.dumps(self._reports[fields.integer("known", 0, MOST_REPORTS) :]).encode())

    def _clock(self, _: Fields, __: Body, reply: Reply) -> None:
        reply({"value": self.seconds}, b"")

    def _say_gone(self, fields: Fields, _: Body, reply: Reply) -> None:
        reply({}, _by_reason(self._gone.get(fields.text("group", most=MOST_NAME), {})))

    def _ended(self, fields: Fields, _: Body, reply: Reply) -> None:
        """The member's process ended with 0: if it has never connected, it will not connect."""
        group, member = fields.text("group", most=MOST_NAME), fields.integer("member", 0, members.MOST_MEMBERS - 1)
        gone = self._gone.setdefault(group, {})
        if member not in self.present.get(group, {}) and member not in gone:
            gone[member] = "left"
            self.review()
        reply({}, b"")

    def _join(self, fields: Fields, _: Body, reply: Reply) -> None:
        group, member = fields.text("group", most=MOST_NAME), fields.integer("member", 0, members.MOST_MEMBERS - 1)
        present = self.present.setdefault(group, {})
        if member in present:
            reply({"error": "twice"}, b"")
            return
        present[member] = fields.text("machine", most=MOST_NAME)
        self._gone.get(group, {}).pop(member, None)
        reply({}, b"")

    def _depart(self, fields: Fields, _: Body, reply: Reply) -> None:
        mask = members.from_ranges(fields.header.get("members"), members.MOST_MEMBERS)
        self.depart(fields.text("group", most=MOST_NAME), mask, printable(fields.text("how")))
        reply({}, b"")

    def _times(self, fields: Fields, _: Body, reply: Reply) -> None:
        group, number = fields.text("group", most=MOST_NAME), fields.integer("number", 0, 1 << 60)
        answer = asyncio.ensure_future(self.collect_times(group, number))
        answer.add_done_callback(lambda done: reply({}, json.dumps(sorted(done.result().items())).encode()))

    def depart(self, group: str, mask: int, how: str) -> None:
        present, gone = self.present.setdefault(group, {}), self._gone.setdefault(group, {})
        for member in members.each(mask):
            if present.pop(member, None) is not None:  # else it was lost already
                gone[member] = how
        self.review()

    def lose(self, machine: str, how: str) -> None:
        """The machine is silent: its members count as lost, even if TCP connections remain."""
        for group, present in self.present.items():
            mask = sum(members.one(member) for member, named in present.items() if named == machine)
            if mask:
                self.depart(group, mask, how)

    _HANDLERS: ClassVar[dict[str, Callable[[Root, Fields, Body, Reply], None]]] = {
        "set": _set,
        "get": _get,
        "keys": _keys,
        "fail": _fail,
        "failures": _failures,
        "clock": _clock,
        "gone": _say_gone,
        "ended": _ended,
        "join": _join,
        "depart": _depart,
        "times": _times,
    }


def _by_reason(gone: dict[int, str]) -> bytes:
    """JSON: ``[[ranges, how], ...]``, in the order of the first members."""
    masks: dict[str, int] = {}
    for member in sorted(gone):
        masks[gone[member]] = masks.get(gone[member], 0) | members.one(member)
    return json.dumps([[members.ranges(mask), how] for how, mask in masks.items()]).encode()


# Barriers of one rendezvous round: which members have arrived, which wait for an answer, and until when.
#
# The server at the root and every relay keep the same state; what they do with a barrier differs (``rounds.py``).


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
