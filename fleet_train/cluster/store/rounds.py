"""One rendezvous round: stored values, departed members, reported failures, and which members wait where.

A restarted job uses a new round, at the same port, so that nothing of a failed attempt is visible to the next.
The round is kept at the root of the tree; a relay (``relay.py``) keeps the barriers of its own members and asks its
parent. Used by the event loop's thread only.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.store import members
from fleet_train.cluster.store.payloads import KINDS, Arrival, Key, Participant, Payload, TooLarge, times_of
from fleet_train.cluster.store.wire import Body, Fields, Header, Json, ProtocolError, encode, parse, shortened

# How many bytes members may store under keys, and how long a key may be.
_MOST_STORED_BYTES = 64 << 20
_MOST_KEYS = 1 << 18
MOST_NAME = 500
_MOST_LEVELS = 10
# More reports add nothing: the first ones identify the failed ranks, and the job is ending.
MOST_REPORTS = 256
_MOST_REPORT_BYTES = 1 << 18
_MOST_MESSAGE = 8000
_MOST_LINES = 100
# A reader of the members' times may be this many barriers behind.
_KEPT_TIMES = 8

Reply = Callable[[Header, Body], None]


@dataclass
class Waiter:
    """``mask``: its members; ``deadline``: on the loop's clock."""

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
    """Arrived, and left after their own timeout: not responsible if others arrived shortly after them."""
    calls: dict[str, int] = field(default_factory=dict)
    waiters: dict[Participant, Waiter] = field(default_factory=dict)
    is_reported: bool = False
    """Of a relay: whether its parent knows of some members."""
    tell_at: float | None = None
    """Of a relay: when its parent is told who has arrived so far."""

    @property
    def missing(self) -> int:
        return members.all_of(self.count) & ~self.arrived

    def add(self, arrival: Arrival, now: float) -> None:
        """Raises ProtocolError, TooLarge for the members' data; then they have not arrived."""
        self.payload.add(arrival)
        self.arrived |= arrival.mask
        self.withdrawn &= ~arrival.mask
        for call, mask in arrival.calls.items():
            self.calls[call] = self.calls.get(call, 0) | mask
        self.waiters[arrival.participant] = Waiter(arrival.mask, now + arrival.timeout)

    def frame(self, header: Header, body: Body = b"") -> bytes:
        return encode({**header, "to": list(self.key)}, body)


class Round(ABC):
    """A session's interface to a round, wherever its root is, and its barriers that wait.

    ``grace_seconds``: how much longer than their own timeout members may wait here.
    """

    def __init__(self, clock: Callable[[], float], grace_seconds: float = 0.0) -> None:
        self.clock = clock
        self.pending: dict[Key, Barrier] = {}
        self._grace_seconds = grace_seconds

    def arrive(self, arrival: Arrival) -> None:
        """Raises ProtocolError for the members' data."""
        barrier = self.pending.get(arrival.key)
        if barrier is None:
            payload = KINDS[arrival.key.kind]()
            barrier = Barrier(arrival.key, arrival.count, members.first(arrival.mask), payload)
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
    def _on_timeout(self, barrier: Barrier, late: list[Participant]) -> None:
        """The timeout of these has expired."""

    def tick(self, now: float) -> None:
        """Called every few hundredths of a second."""
        for barrier in list(self.pending.values()):
            over = now - self._grace_seconds
            late = [who for who, waiter in barrier.waiters.items() if waiter.deadline <= over]
            if late:
                self._on_timeout(barrier, late)

    def depart(self, via: str, how: str) -> None:
        """All members that are present by way of this connection have departed: ``left``, or how they were lost."""
        self.ask({"do": "depart", "via": via, "how": how}, b"", _nothing)

    def forget(self, participant: Participant) -> None:
        """Its connection has ended: its data stays while others wait."""
        for barrier in list(self.pending.values()):
            if barrier.waiters.pop(participant, None) is not None and not barrier.waiters:
                del self.pending[barrier.key]

    def _withdraw(self, barrier: Barrier, late: list[Participant], frame: bytes) -> None:
        """Their timeout has expired: they no longer count as arrived, so that a later use of this barrier starts clean;
        the others continue to wait."""
        for participant in late:
            mask = barrier.waiters.pop(participant).mask
            barrier.withdrawn |= mask
            barrier.arrived &= ~mask
            participant.send(frame)
        if not barrier.waiters:
            self.pending.pop(barrier.key, None)

    def _finish(self, barrier: Barrier, frame: bytes) -> None:
        """The same bytes for all."""
        self.pending.pop(barrier.key, None)
        waiters, barrier.waiters = barrier.waiters, {}
        for participant in waiters:
            participant.send(frame)


def _nothing(_: Header, __: Body) -> None:
    """A departure needs no answer."""


@dataclass
class Group:
    """The members of one group."""

    present: dict[int, list[str]] = field(default_factory=dict)
    """Member -> its machine, and the connections by which it is present."""
    gone: dict[int, str] = field(default_factory=dict)
    """Member -> ``left``, or how it was lost."""
    barriers: int = 0
    """How many step barriers were completed."""
    times: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    """What the members said about their times at the last ones, by number."""
    crossed_at: float | None = None
    """Since when all members wait at different barriers."""


class Root(Round):
    """The round itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._began = clock()
        self._groups: dict[str, Group] = {}
        self._values: dict[str, Body] = {}
        self._stored_bytes = 0
        self._reports: list[tuple[Any, float]] = []

    @property
    def seconds(self) -> float:
        return round(self.clock() - self._began, 3)

    def _group(self, name: str) -> Group:
        return self._groups.setdefault(name, Group())

    def present(self, group: str) -> set[int]:
        """Other threads may ask (a racy reading)."""
        return set(self._groups[group].present.copy()) if group in self._groups else set()

    @property
    def has_members(self) -> bool:
        """Other threads may ask (a racy reading)."""
        return any(group.present for group in self._groups.copy().values())

    # barriers

    def _arrived(self, barrier: Barrier, arrival: Arrival) -> None:
        if barrier.count != arrival.count:
            counts = [[barrier.first, barrier.count], [members.first(arrival.mask), arrival.count]]
            self._finish(barrier, barrier.frame({"error": "count", "counts": counts}))
        elif not barrier.missing:
            header, body = barrier.payload.result()
            if barrier.key.kind == "barrier":
                group = self._group(barrier.key.group)
                group.barriers += 1
                group.times.append((group.barriers, barrier.payload.part()[1]))
                header["number"] = group.barriers
            self._finish(barrier, barrier.frame(header, body))
        else:
            self._give_up_if_hopeless(barrier)

    def _give_up_if_hopeless(self, barrier: Barrier) -> None:
        gone = self._group(barrier.key.group).gone
        if self._reports:
            self._finish(barrier, barrier.frame({"error": "failed"}, json.dumps(self._reports[0][0]).encode()))
        elif lost := {member: how for member, how in gone.items() if barrier.missing >> member & 1}:
            call = next(filter(None, barrier.calls), "")
            self._finish(barrier, barrier.frame({"error": "gone", "call": call}, _by_reason(lost)))

    def _review(self) -> None:
        """Answer every barrier that can no longer be complete."""
        for barrier in list(self.pending.values()):
            self._give_up_if_hopeless(barrier)

    def _on_timeout(self, barrier: Barrier, late: list[Participant]) -> None:
        blamed = members.ranges(barrier.missing & ~barrier.withdrawn)
        self._withdraw(barrier, late, barrier.frame({"error": "timeout", "missing": blamed}))

    def tick(self, now: float) -> None:
        super().tick(now)
        for name, group in self._groups.items():
            pending = [barrier for key, barrier in self.pending.items() if key.group == name]
            waiting = 0
            for barrier in pending:
                waiting |= barrier.arrived
            if len(pending) < 2 or waiting != members.all_of(max(barrier.count for barrier in pending)):
                group.crossed_at = None
            elif group.crossed_at is None:
                group.crossed_at = now
            elif now - group.crossed_at >= timeouts.CROSSED_SECONDS:
                self._report_crossed(pending)

    def _report_crossed(self, pending: list[Barrier]) -> None:
        """All members wait, but at different barriers, so none can complete: report which member waits where."""
        where = [
            [members.ranges(mask & barrier.arrived), barrier.key.name, call]
            for barrier in pending
            for call, mask in barrier.calls.items()
        ]
        for barrier in pending:
            self._finish(barrier, barrier.frame({"error": "crossed"}, json.dumps(where).encode()))

    # requests that do not wait

    def ask(self, request: Header, body: Body, reply: Reply) -> None:
        fields = Fields(request)
        header: Header = {}
        match fields.text("do", most=20):
            case "set":
                if not self.put(fields.text("key", most=MOST_NAME), body):
                    header["error"] = "full"
                answer = b""
            case "get":
                answer = self._values.get(fields.text("key", most=MOST_NAME), b"")
            case "keys":
                prefix = fields.text("prefix", most=MOST_NAME)
                answer = _json([key for key in self._values if key.startswith(prefix)])
            case "fail":
                answer = self._fail(checked_report(body))
            case "failures":  # the reports that are new to the caller: it knows this many already
                answer = _json(self._reports[fields.integer("known", 0, MOST_REPORTS) :])
            case "clock":
                answer = _json(self.seconds)
            case "gone":
                answer = _by_reason(self._groups.get(fields.text("group", most=MOST_NAME), Group()).gone)
            case "ended":
                answer = self._ended(*self._member(fields))
            case "join":
                header, answer = self._join(*self._member(fields), via_of(request))
            case "depart":
                answer = self._depart(fields.text("via"), shortened(fields.text("how")))
            case "times":
                group, number = fields.text("group", most=MOST_NAME), fields.integer("number", 0, 1 << 60)
                answer = self._times_until(self._groups.get(group, Group()), number)
            case _:
                raise ProtocolError("an unknown request")
        reply(header, answer)

    def _member(self, fields: Fields) -> tuple[Group, int]:
        group = self._group(fields.text("group", most=MOST_NAME))
        return group, fields.integer("member", 0, members.MOST_MEMBERS - 1)

    def put(self, key: str, body: Body) -> bool:
        """Whether there was room for it; where not, what was there before stays."""
        stored = self._stored_bytes + len(body) - len(self._values.get(key, b""))
        keys = len(self._values) + (key not in self._values)
        if stored > _MOST_STORED_BYTES or keys > _MOST_KEYS:
            return False
        self._stored_bytes, self._values[key] = stored, body
        return True

    def _fail(self, report: Json) -> Body:
        if len(self._reports) < MOST_REPORTS:
            self._reports.append((report, self.seconds))
        if len(self._reports) == 1:
            self._review()
        return b""

    def _ended(self, group: Group, member: int) -> Body:
        """The member's process ended with 0: if it has never connected, it will not connect."""
        if member not in group.present and member not in group.gone:
            group.gone[member] = "left"
            self._review()
        return b""

    def _join(self, group: Group, member: int, via: list[str]) -> tuple[Header, Body]:
        if member in group.present:
            return {"error": "twice"}, b""
        group.present[member] = via
        group.gone.pop(member, None)
        return {}, b""

    def _depart(self, via: str, how: str) -> Body:
        for group in self._groups.values():
            for member in [member for member, by in group.present.items() if via in by]:
                del group.present[member]
                group.gone[member] = how
        self._review()
        return b""

    def _times_until(self, group: Group, number: int) -> Body:
        at = [times for completed, times in group.times if completed <= number]
        return _json(times_of(at[-1]) if at else [])


def checked_report(body: Body) -> dict[str, Any]:
    """The report in ``body``. Raises ProtocolError; texts are cut and made shortened, a code of 0 becomes 1."""
    if len(body) > _MOST_REPORT_BYTES:
        raise ProtocolError("a failure report is too long")
    report = {str(name)[:100]: _checked(value) for name, value in parse(body).items()}
    code = report.get("exit_code")
    if "exit_code" in report:
        report["exit_code"] = (code & 0xFF) or 1 if type(code) is int else 1
    return report


def _checked(value: Any) -> Any:
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int:
        if abs(value) > 1 << 53:
            raise ProtocolError("a failure report holds a number that is too long")
        return value
    if isinstance(value, str):
        return shortened(value, _MOST_MESSAGE)
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return [shortened(line) for line in value[:_MOST_LINES]]
    raise ProtocolError("a failure report holds something other than texts, numbers and lines")


def via_of(request: Header) -> list[str]:
    """The machine and the connections by way of which a member joins. Raises ProtocolError."""
    via = request.get("via", [])
    if not isinstance(via, list) or len(via) > _MOST_LEVELS:
        raise ProtocolError("a member's connections are not a list, or too many")
    if not all(isinstance(each, str) and len(each) <= 2 * MOST_NAME for each in via):
        raise ProtocolError("a connection has no name")
    return via


def _json(value: Json) -> bytes:
    return json.dumps(value).encode()


def _by_reason(gone: dict[int, str]) -> bytes:
    """JSON: ``[[ranges, how], ...]``, in the order of the first members."""
    masks: dict[str, int] = {}
    for member in sorted(gone):
        masks[gone[member]] = masks.get(gone[member], 0) | members.one(member)
    return _json([[members.ranges(mask), how] for how, mask in masks.items()])
