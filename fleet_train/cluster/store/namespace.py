"""One namespace of the store: stored values, departed members, reported failures, and which members wait where.

A restarted job uses a new namespace, at the same port, so that nothing of a failed attempt is visible to the next.
The namespace is kept at the root of the tree; a relay (``relay.py``) keeps the barriers of its own members and asks its
parent. Used by the event loop's thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleet_train.cluster.store.reports import checked_report
from fleet_train.cluster.store.wire import (
    KINDS,
    MOST_MEMBERS,
    MOST_NAME,
    Arrival,
    Body,
    Fields,
    Header,
    Json,
    Key,
    Payload,
    ProtocolError,
    StoreParticipant,
    TooLarge,
    all_members,
    encode,
    first_member,
    shortened,
    to_json,
    to_ranges,
    unpack_times,
)

_CROSSED_SECONDS = 1.0
"""How long all members may wait at different barriers before that is an error and no coincidence."""

# How many bytes members may store under keys, and how many keys.
_MOST_STORED_BYTES = 64 << 20
_MOST_KEYS = 1 << 18
_MOST_LEVELS = 10
# More reports add nothing: the first ones identify the failed ranks, and the job is ending.
_MOST_REPORTS = 256
# A reader of the members' times may be this many barriers behind.
_KEPT_TIMES = 8

Reply = Callable[[Header, Body], None]


@dataclass
class Waiter:
    """A participant's wait at a barrier. ``mask``: its members; ``deadline``: on the loop's clock."""

    mask: int
    deadline: float


@dataclass
class Barrier:
    """A barrier that has not been answered yet."""

    key: Key
    count: int
    first: int
    payload: Payload
    arrived: int = 0
    withdrawn: int = 0
    """Members that arrived and left after their own timeout: not responsible if others arrived shortly after them."""
    calls: dict[str, int] = field(default_factory=dict)
    """The calls in the members' scripts -> the members that gave them; others are in a step of training."""
    waiters: dict[StoreParticipant, Waiter] = field(default_factory=dict)
    is_reported: bool = False
    """In a relay: whether its parent knows of some of the barrier's members."""
    report_at: float | None = None
    """In a relay: when its parent is sent who has arrived so far; None: not planned."""

    @property
    def missing(self) -> int:
        return all_members(self.count) & ~self.arrived

    def add(self, arrival: Arrival, now: float) -> None:
        """Add an arrival. Raises ProtocolError, TooLarge for the members' data; then they have not arrived."""
        self.payload.add(arrival)
        self.arrived |= arrival.mask
        self.withdrawn &= ~arrival.mask
        for call, mask in arrival.calls.items():
            self.calls[call] = self.calls.get(call, 0) | mask
        self.waiters[arrival.participant] = Waiter(arrival.mask, now + arrival.timeout)

    def frame(self, header: Header, body: Body = b"") -> bytes:
        return encode({**header, "to": list(self.key)}, body)


class StoreNamespace(ABC):
    """A connection's interface to a namespace, wherever its root is, and its barriers that wait.

    ``grace_seconds``: how much longer than their own timeout members may wait here.
    """

    def __init__(self, clock: Callable[[], float], grace_seconds: float = 0.0) -> None:
        self.clock = clock
        self.pending: dict[Key, Barrier] = {}
        self._grace_seconds = grace_seconds

    def arrive(self, arrival: Arrival) -> None:
        """Let members arrive at a barrier. Raises ProtocolError for their data."""
        barrier = self.pending.get(arrival.key)
        if barrier is None:
            payload = KINDS[arrival.key.kind]()
            barrier = Barrier(arrival.key, arrival.count, first_member(arrival.mask), payload)
        if arrival.again and arrival.participant not in barrier.waiters:
            return  # it crossed our answer
        try:
            barrier.add(arrival, self.clock())
        except TooLarge:
            barrier.waiters[arrival.participant] = Waiter(arrival.mask, 0.0)
            self._finish(barrier, barrier.frame({"error": "large"}))
            return
        self.pending[arrival.key] = barrier
        self._arrived(barrier, arrival)

    @abstractmethod
    def ask(self, request: Header, body: Body, reply: Reply) -> None:
        """Execute a request that does not wait for other members; raises ProtocolError, or calls ``reply`` once."""

    @abstractmethod
    def _arrived(self, barrier: Barrier, arrival: Arrival) -> None: ...

    @abstractmethod
    def _on_timeout(self, barrier: Barrier, late: list[StoreParticipant]) -> None:
        """Answer the participants ``late``, whose timeout has expired."""

    def tick(self, now: float) -> None:
        """Called every few hundredths of a second."""
        for barrier in list(self.pending.values()):
            over = now - self._grace_seconds
            late = [who for who, waiter in barrier.waiters.items() if waiter.deadline <= over]
            if late:
                self._on_timeout(barrier, late)

    def depart(self, via: str, how: str) -> None:
        """All members that are present by way of this connection have departed: ``left``, or how they were lost."""
        self.ask({"do": "depart", "via": via, "how": how}, b"", lambda _, __: None)

    def forget(self, participant: StoreParticipant) -> None:
        """Stop waiting for a participant whose connection has ended: its data stays while others wait."""
        for barrier in list(self.pending.values()):
            if barrier.waiters.pop(participant, None) is not None and not barrier.waiters:
                del self.pending[barrier.key]

    def _withdraw(self, barrier: Barrier, late: list[StoreParticipant], frame: bytes) -> None:
        """Answer participants whose timeout has expired: they no longer count as arrived, so that a later use of this
        barrier starts clean; the others continue to wait."""
        for participant in late:
            mask = barrier.waiters.pop(participant).mask
            barrier.withdrawn |= mask
            barrier.arrived &= ~mask
            participant.send(frame)
        if not barrier.waiters:
            self.pending.pop(barrier.key, None)

    def _finish(self, barrier: Barrier, frame: bytes) -> None:
        """End a barrier with the same bytes for all who wait at it."""
        self.pending.pop(barrier.key, None)
        waiters, barrier.waiters = barrier.waiters, {}
        for participant in waiters:
            participant.send(frame)


@dataclass
class Group:
    """The members of one group."""

    present: dict[int, list[str]] = field(default_factory=dict)
    """The members that are present: member -> its machine, and the connections by which it is present."""
    gone: dict[int, str] = field(default_factory=dict)
    """The members that are gone: member -> ``left``, or how it was lost."""
    barriers: int = 0
    """How many step barriers were completed."""
    times: deque[tuple[int, Body]] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    """What the members said about their times at the last step barriers, by the barrier's number."""
    crossed_at: float | None = None
    """Since when all members wait at different barriers."""


class Root(StoreNamespace):
    """The namespace itself, to which other nodes' servers relay."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._began = clock()
        self._groups: dict[str, Group] = {}
        self._values: dict[str, Body] = {}
        self._stored_bytes = 0
        self._reports: list[tuple[Any, float]] = []

    def _group(self, name: str) -> Group:
        return self._groups.setdefault(name, Group())

    def present(self, group: str) -> set[int]:
        """The members of a group that are present; other threads may ask (a racy reading)."""
        return set(self._groups[group].present.copy()) if group in self._groups else set()

    @property
    def has_members(self) -> bool:
        """Whether any member is present; other threads may ask (a racy reading)."""
        return any(group.present for group in self._groups.copy().values())

    # barriers

    def _arrived(self, barrier: Barrier, arrival: Arrival) -> None:
        if barrier.count != arrival.count:
            counts = [[barrier.first, barrier.count], [first_member(arrival.mask), arrival.count]]
            self._finish(barrier, barrier.frame({"error": "count", "counts": counts}))
        elif not barrier.missing:
            header, body = barrier.payload.part()
            if barrier.key.kind == "barrier":
                group = self._group(barrier.key.group)
                group.barriers += 1
                group.times.append((group.barriers, body))  # they are sent when they are read
                header["number"], body = group.barriers, b""
            self._finish(barrier, barrier.frame(header, body))
        else:
            self._give_up_if_hopeless(barrier)

    def _give_up_if_hopeless(self, barrier: Barrier) -> None:
        gone = self._group(barrier.key.group).gone
        if self._reports:
            self._finish(barrier, barrier.frame({"error": "failed"}, to_json(self._reports[0][0])))
        elif lost := {member: how for member, how in gone.items() if barrier.missing >> member & 1}:
            call = next(iter(barrier.calls), "")
            self._finish(barrier, barrier.frame({"error": "gone", "call": call}, _by_reason(lost)))

    def _review(self) -> None:
        """Answer every barrier that can no longer be complete."""
        for barrier in list(self.pending.values()):
            self._give_up_if_hopeless(barrier)

    def _on_timeout(self, barrier: Barrier, late: list[StoreParticipant]) -> None:
        missing = to_ranges(barrier.missing & ~barrier.withdrawn)
        self._withdraw(barrier, late, barrier.frame({"error": "timeout", "missing": missing}))

    def tick(self, now: float) -> None:
        super().tick(now)
        for name, group in self._groups.items():
            pending = [barrier for key, barrier in self.pending.items() if key.group == name]
            waiting = 0
            for barrier in pending:
                waiting |= barrier.arrived
            if len(pending) < 2 or waiting != all_members(max(barrier.count for barrier in pending)):
                group.crossed_at = None
            elif group.crossed_at is None:
                group.crossed_at = now
            elif now - group.crossed_at >= _CROSSED_SECONDS:
                self._report_crossed(pending)

    def _report_crossed(self, pending: list[Barrier]) -> None:
        """All members wait, but at different barriers, so none can complete: report which member waits where."""
        where = []
        for barrier in pending:
            steps = barrier.arrived
            for call, mask in barrier.calls.items():
                steps &= ~mask
                where.append([to_ranges(mask & barrier.arrived), barrier.key.name, call])
            if steps:
                where.append([to_ranges(steps), barrier.key.name, ""])
        for barrier in pending:
            self._finish(barrier, barrier.frame({"error": "crossed"}, to_json(where)))

    # requests that do not wait

    def ask(self, request: Header, body: Body, reply: Reply) -> None:
        fields = Fields(request)
        header: Header = {}
        answer = b""
        match fields.text("do", most=20):
            case "set":
                if not self.put(fields.text("key", most=MOST_NAME), body):
                    header["error"] = "full"
            case "get":
                answer = self._values.get(fields.text("key", most=MOST_NAME), b"")
            case "keys":
                prefix = fields.text("prefix", most=MOST_NAME)
                answer = to_json([key for key in self._values if key.startswith(prefix)])
            case "fail":
                self._fail(checked_report(body))
            case "failures":  # the reports that are new to the caller: it knows this many already
                answer = to_json(self._reports[fields.integer("known", 0, _MOST_REPORTS) :])
            case "clock":
                answer = to_json(self._seconds)
            case "gone":
                answer = _by_reason(self._groups.get(fields.text("group", most=MOST_NAME), Group()).gone)
            case "ended":
                self._ended(*self._member(fields))
            case "join":
                header = self._join(*self._member(fields), via_of(request))
            case "depart":
                self._depart(fields.text("via"), shortened(fields.text("how")))
            case "times":
                group, number = fields.text("group", most=MOST_NAME), fields.integer("number", 0, 1 << 60)
                times = [each for at, each in self._groups.get(group, Group()).times if at <= number]
                answer = to_json(unpack_times(times[-1]) if times else [])
            case _:
                raise ProtocolError("an unknown request")
        reply(header, answer)

    @property
    def _seconds(self) -> float:
        return round(self.clock() - self._began, 3)

    def _member(self, fields: Fields) -> tuple[Group, int]:
        return self._group(fields.text("group", most=MOST_NAME)), fields.integer("member", 0, MOST_MEMBERS - 1)

    def put(self, key: str, body: Body) -> bool:
        """Store a value; returns whether there was room for it: where not, what was there before stays."""
        stored = self._stored_bytes + len(body) - len(self._values.get(key, b""))
        keys = len(self._values) + (key not in self._values)
        if stored > _MOST_STORED_BYTES or keys > _MOST_KEYS:
            return False
        self._stored_bytes, self._values[key] = stored, body
        return True

    def _fail(self, report: Json) -> None:
        if len(self._reports) < _MOST_REPORTS:
            self._reports.append((report, self._seconds))
        if len(self._reports) == 1:
            self._review()

    def _ended(self, group: Group, member: int) -> None:
        """The member's process ended with 0: if it has never connected, it will not connect."""
        if member not in group.present and member not in group.gone:
            group.gone[member] = "left"
            self._review()

    def _join(self, group: Group, member: int, via: list[str]) -> Header:
        if member in group.present:
            return {"error": "twice"}
        group.present[member] = via
        group.gone.pop(member, None)
        return {}

    def _depart(self, via: str, how: str) -> None:
        for group in self._groups.values():
            for member in [member for member, by in group.present.items() if via in by]:
                del group.present[member]
                group.gone[member] = how
        self._review()


def via_of(request: Header) -> list[str]:
    """The machine and the connections by way of which a member joins. Raises ProtocolError."""
    via = request.get("via", [])
    if not isinstance(via, list) or len(via) > _MOST_LEVELS:
        raise ProtocolError("a member's connections are not a list, or too many")
    if not all(isinstance(each, str) and len(each) <= 2 * MOST_NAME for each in via):
        raise ProtocolError("a connection has no name")
    return via


def _by_reason(gone: dict[int, str]) -> Body:
    """JSON: ``[[ranges, how], ...]``, in the order of the first members."""
    masks: dict[str, int] = {}
    for member in sorted(gone):
        masks[gone[member]] = masks.get(gone[member], 0) | 1 << member
    return to_json([[to_ranges(mask), how] for how, mask in masks.items()])
