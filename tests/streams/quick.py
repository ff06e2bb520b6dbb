"""The same replay as ``replay``, for ranks with a single calling thread: an interleaving is then a table lookup.

How much stands on each stream follows from how far the host is, so a host does a random number of actions in a turn,
and a calculation stream goes on by a random number of items. Other threads only wait at barriers:
who waits for their result waits until all ranks have handed that barrier over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.streams.replay import PACES, Booleans, Found, run_to_the_end
from tests.streams.tables import KERNEL, Integers, Mismatch, Stream, streams_of
from tests.streams.trace import COMPUTING, Action, Op, Trace, mismatches
from tests.streams.words import Standstill

_FREE, _SYNC, _READ, _BARRIER, _END = range(5)
_NEVER = 1 << 30


class SeveralCallers(AssertionError):
    """A rank of which several threads put something on streams: `replay` is for those."""


_STOP, _CODE, _TAIL, _EVENT, _BARRIER_NUMBER, _MET, _ENQUEUED = range(7)
"""Columns of ``Schedule.hosts``. The next action that may block; what the host stands at; items put on the calculation
stream; of a READ: how many of them must be done; of a BARRIER: its number; how many barriers this rank has come to;
collectives enqueued, from here on one column for each of the rank's streams."""


@dataclass(frozen=True)
class Schedule:
    """Ranks by how far their hosts are, and their communicators' streams by how many collectives have ended."""

    traces: Sequence[Trace]
    streams: list[Stream]
    groups: list[Integers]
    """Of each group, the slots that are its streams: a slot is rank * width + number of the rank's stream."""
    width: int
    hosts: Integers
    """[columns, ranks * length]"""
    length: int
    calls: Integers
    """[2, slots * most]: items of the calculation stream that must be done before the next collective starts, and the
    first item that waits for it."""
    most: int
    queues: list[list[tuple[int, int]]]
    """By rank, what is put on its calculation stream."""

    @property
    def ranks(self) -> int:
        return len(self.traces)


def schedule_of(traces: Sequence[Trace]) -> Schedule:
    """Raises Mismatch where ranks call different things, SeveralCallers where this replay is not for them."""
    if found := mismatches(traces):
        raise Mismatch("; ".join(found))
    streams = streams_of(traces)
    barriers = _barriers(traces)
    hosts = [_Host(trace, barriers) for trace in traces]
    length = max(len(host.code) for host in hosts)
    most = 1 + max([1, *(len(stream.calls) for stream in streams)])
    of_rank = [[stream for stream in streams if stream.rank == trace.rank] for trace in traces]
    width = max([1, *map(len, of_rank)])
    slots = {
        (stream.rank, stream.group): stream.rank * width + number
        for own in of_rank
        for number, stream in enumerate(own)
    }
    places = {(s.rank, call): (index, place) for index, s in enumerate(streams) for place, call in enumerate(s.calls)}
    padding = [None] * width
    return Schedule(
        traces,
        streams,
        [
            np.array([slot for (_, group), slot in slots.items() if group == one])
            for one in sorted({stream.group for stream in streams})
        ],
        width,
        np.concatenate([_host_rows(h, own, length, width) for h, own in zip(hosts, of_rank, strict=True)]).T.copy(),
        length,
        np.concatenate(
            [
                _call_rows(host, stream, most)
                for host, own in zip(hosts, of_rank, strict=True)
                for stream in [*own, *padding][:width]
            ]
        ).T.copy(),
        most,
        [[(KERNEL, 0) if call < 0 else places[host.trace.rank, call] for call in host.queue] for host in hosts],
    )


def _barriers(traces: Sequence[Trace]) -> dict[str, int]:
    """Barriers by name, in the order in which every rank reaches them."""
    orders = [[what for what, _ in sorted(_reached(trace).items(), key=lambda item: item[1])] for trace in traces]
    if any(order != orders[0] for order in orders):
        raise SeveralCallers("the ranks reach their barriers in different orders")
    return {what: number for number, what in enumerate(orders[0])}


def _reached(trace: Trace) -> dict[str, tuple[int, int]]:
    """By barrier: how many actions the computing thread has done when this rank reaches it, and which one it is."""
    reached: dict[str, tuple[int, int]] = {}
    for index, action in enumerate(trace.threads[COMPUTING]):
        if action.op is Op.BARRIER:
            reached[action.what] = index, 0
    for name, actions in trace.threads.items():
        handed_over = 0
        for index, action in enumerate(actions if name != COMPUTING else ()):
            if action.op is Op.AFTER and action.what == COMPUTING:
                handed_over = action.number
            elif action.op is Op.BARRIER:
                reached[action.what] = handed_over, index
            else:
                raise SeveralCallers(f"rank {trace.rank}: thread {name} does {action.op.name}")
    return reached


class _Host:
    """One computing thread, by actions done."""

    def __init__(self, trace: Trace, barriers: dict[str, int]) -> None:
        self.trace, self._barriers = trace, barriers
        self.queue: list[int] = []
        self.code: list[int] = []
        self.tail: list[int] = []
        self.event: list[int] = []
        self.barrier: list[int] = []
        self.begun: dict[int, tuple[int, int]] = {}
        """By collective: (actions done behind its call, items that it needs)."""
        self._events: dict[int, int] = {}
        for action in trace.threads[COMPUTING]:
            self._stand_at(action)
            self._put(action)
        self._note(_END)
        self.stop = self._stops()
        reached = sorted(index for index, _ in _reached(trace).values())
        self.met = np.searchsorted(reached, np.arange(len(self.code)), side="right").tolist()

    def _note(self, code: int, event: int = 0, barrier: int = 0) -> None:
        self.code.append(code)
        self.tail.append(len(self.queue))
        self.event.append(event)
        self.barrier.append(barrier)

    def _stand_at(self, action: Action) -> None:
        match action.op:
            case Op.SYNC:
                self._note(_SYNC)
            case Op.READ:
                self._note(_READ, event=self._events[action.number])
            case Op.BARRIER:
                self._note(_BARRIER, barrier=self._barriers[action.what])
            case Op.AFTER:
                before = self.trace.threads[action.what][: action.number]
                met = [other.what for other in before if other.op is Op.BARRIER]
                self._note(_BARRIER, barrier=self._barriers[met[-1]]) if met else self._note(_FREE)
            case _:
                self._note(_FREE)

    def _put(self, action: Action) -> None:
        match action.op:
            case Op.KERNEL:
                self.queue.append(KERNEL)
            case Op.WAIT:
                self.queue.append(action.number)
            case Op.BEGIN:
                self.begun[action.number] = len(self.code), len(self.queue)
            case Op.RECORD:
                self._events[action.number] = len(self.queue)

    def _stops(self) -> list[int]:
        stops, following = [], len(self.code) - 1
        for index in range(len(self.code) - 1, -1, -1):
            following = index if self.code[index] != _FREE else following
            stops.append(following)
        return stops[::-1]


def _host_rows(host: _Host, streams: Sequence[Stream], length: int, width: int) -> Integers:
    rows = np.zeros((length, _ENQUEUED + width), np.int32)
    columns = (host.stop, host.code, host.tail, host.event, host.barrier, host.met)
    for column, values in enumerate(columns):
        rows[:, column] = [*values, *[values[-1]] * (length - len(values))]
    for number, stream in enumerate(streams):
        begun = [host.begun[call][0] for call in stream.calls]
        rows[:, _ENQUEUED + number] = np.searchsorted(begun, np.arange(length), side="right")
    return rows


def _call_rows(host: _Host, stream: Stream | None, most: int) -> Integers:
    rows = np.full((most, 2), _NEVER, np.int32)
    if stream is None:
        return rows
    rows[: len(stream.calls), 0] = [host.begun[call][1] for call in stream.calls]
    place_of = {call: place for place, call in enumerate(stream.calls)}
    for position in range(len(host.queue) - 1, -1, -1):
        rows[: place_of.get(host.queue[position], -1) + 1, 1] = position
    return rows


def replay_quickly(
    schedule: Schedule,
    interleavings: int,
    random: np.random.Generator,
    one_resident: bool = True,
    on_done: Callable[[int], None] = lambda _: None,
) -> Found:
    """As `replay.replay`; ``on_done`` is told how many more interleavings are over."""
    return run_to_the_end(_State(schedule, interleavings, random, one_resident), on_done)


def _part(most: Any, share: Any, who: Any) -> Any:
    """How much those do who go on: half of them all that they can, the others a part."""
    part = np.minimum(np.ceil(most * share), most).astype(np.int32)
    return np.maximum(part, 1, out=part) * who


class _State:
    """Of many interleavings: the last axis of every array. What is over changes no more."""

    def __init__(self, schedule: Schedule, size: int, random: np.random.Generator, one_resident: bool) -> None:
        self._of, self._random, self._one_resident = schedule, random, one_resident
        ranks, slots = schedule.ranks, schedule.ranks * schedule.width
        self._first_row = np.arange(ranks)[:, None] * schedule.length
        self._first_call = np.arange(slots)[:, None] * schedule.most
        self.done, self.head = np.zeros((ranks, size), np.int32), np.zeros((ranks, size), np.int32)
        self.started, self.ended = np.zeros((slots, size), np.int32), np.zeros((slots, size), np.int32)
        self.pace = random.choice(PACES, (2 * ranks + 2 * slots, size))

    @property
    def size(self) -> int:
        return self.done.shape[1]

    def keep(self, which: Booleans) -> None:
        for name, value in vars(self).items():
            if not name.startswith("_"):
                setattr(self, name, value[:, which])

    def turn(self) -> Any:
        """Let some of those go on that can, and all of them if that is nobody; by interleaving, whether anybody can."""
        rows = self.done + self._first_row
        tail, needs, first_wait = self._column(_TAIL, rows), *self._calls()
        enqueued = self._enqueued(rows)
        steps, moves = self._host_steps(rows, tail, enqueued), self._moves(tail, first_wait)
        able = np.concatenate([steps > 0, moves > 0, self._starts(enqueued, needs), self._ends()])
        drawn = self._random.random(able.shape, np.float32)
        some = able & (drawn < self.pace)
        some |= able & ~some.any(0)
        ranks, slots = len(self.done), len(self.started)
        share = drawn[: 2 * ranks]
        share *= 2 / self.pace[: 2 * ranks]
        self.done += _part(steps, share[:ranks], some[:ranks])
        self.head += _part(moves, share[ranks:], some[ranks : 2 * ranks])
        self.started += self._one_each(some[2 * ranks : 2 * ranks + slots])
        self.ended += some[2 * ranks + slots :]
        return able.any(0)

    def _column(self, column: int, rows: Any) -> Any:
        return self._of.hosts[column].take(rows)

    def _enqueued(self, rows: Any) -> Any:
        """[slots, interleavings]: collectives on each stream."""
        return np.stack([self._column(_ENQUEUED + n, rows) for n in range(self._of.width)], 1).reshape(
            self.started.shape
        )

    def _calls(self) -> tuple[Any, Any]:
        """[slots, interleavings]: items that the next collective needs; the first item that waits for it."""
        rows = self.ended + self._first_call
        return self._of.calls[0].take(rows), self._of.calls[1].take(rows)

    def _by_rank(self, slots: Any) -> Any:
        return slots.reshape(self._of.ranks, self._of.width, -1)

    def _host_steps(self, rows: Any, tail: Any, enqueued: Any) -> Any:
        """[ranks, interleavings]: how many actions each host can do now."""
        codes = self._column(_CODE, rows)
        is_over = (codes == _READ) & (self.head >= self._column(_EVENT, rows))
        is_over |= (codes == _BARRIER) & (self._column(_BARRIER_NUMBER, rows) < self._column(_MET, rows).min(0))
        syncs = codes == _SYNC
        if syncs.any():
            is_over |= syncs & self._drained(tail, enqueued)
        return self._column(_STOP, rows) - self.done + is_over

    def _drained(self, tail: Any, enqueued: Any) -> Booleans:
        """Whether nothing is left on a rank's streams."""
        drained: Booleans = (self.head == tail) & self._by_rank(self.ended == enqueued).all(1)
        return drained

    def _moves(self, tail: Any, first_wait: Any) -> Any:
        """[ranks, interleavings]: how many items each calculation stream can end."""
        return np.minimum(self._by_rank(first_wait).min(1), tail) - self.head

    def _starts(self, enqueued: Any, needs: Any) -> Any:
        """[slots, interleavings]: whether the next collective may become resident."""
        idle = self.started == self.ended
        can = idle & (enqueued > self.started)
        can &= (self._by_rank(needs) <= self.head[:, None]).reshape(can.shape)
        if self._one_resident and self._of.width > 1:
            can &= np.repeat(self._by_rank(idle).all(1), self._of.width, 0)
        return can

    def _ends(self) -> Any:
        """[slots, interleavings]: whether the resident collective is so on all ranks of its group."""
        can = self.started > self.ended
        for slots in self._of.groups:
            can[slots] &= self.started[slots].min(0) >= self.started[slots]
        return can

    def _one_each(self, starts: Any) -> Any:
        """Where one collective may be resident: one of those on the same rank."""
        if not self._one_resident or self._of.width == 1:
            return starts
        keys = self._by_rank(starts * (1 + self._random.random(starts.shape, np.float32)))
        return ((keys > 0) & (keys == keys.max(1)[:, None])).reshape(starts.shape)

    def is_complete(self) -> Booleans:
        """By interleaving: everything is done."""
        rows = self.done + self._first_row
        is_drained = self._drained(self._column(_TAIL, rows), self._enqueued(rows))
        complete: Booleans = ((self._column(_CODE, rows) == _END) & is_drained).all(0)
        return complete

    def describe(self, one: int) -> Standstill:
        of = self._of
        host = of.hosts[:, (self.done + self._first_row)[:, one]].T
        own = {(stream.rank, number): index for index, (stream, number) in enumerate(self._numbered())}
        slots = [rank * of.width + number for rank, number in own]
        needs = of.calls[0].reshape(-1, of.most)
        return Standstill(
            list(of.traces),
            of.streams,
            {(trace.rank, COMPUTING): int(self.done[trace.rank, one]) for trace in of.traces},
            [q[h:t] for q, h, t in zip(of.queues, self.head[:, one], host[:, _TAIL], strict=True)],
            [int(host[rank, _ENQUEUED + number]) for rank, number in own],
            self.started[slots, one].tolist(),
            self.ended[slots, one].tolist(),
            needs[slots].tolist(),
            self.head[:, one].tolist(),
        )

    def _numbered(self) -> list[tuple[Stream, int]]:
        """Streams with their number on their rank."""
        counts: dict[int, int] = {}
        numbered = []
        for stream in self._of.streams:
            numbered.append((stream, counts.get(stream.rank, 0)))
            counts[stream.rank] = counts.get(stream.rank, 0) + 1
        return numbered
