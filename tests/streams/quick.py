"""The same replay as ``replay``, for ranks of which one thread alone calls: what an interleaving does is then a table.

How much stands on each stream follows from how far the host is, so a host does a random number of actions in a turn,
and a calculation stream goes on by a random number of items. Other threads only meet the other ranks (the gates): who
waits for their result waits until all ranks have handed that meeting over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.streams.replay import PACES, Booleans, Found, Standstill
from tests.streams.tables import KERNEL, Integers, Stream, tables_of
from tests.streams.trace import COMPUTING, Action, Op, Trace

_FREE, _SYNC, _READ, _MEET, _END = range(5)
_NEVER = 1 << 30


class SeveralCallers(AssertionError):
    """A rank of which several threads put something on streams: `replay` is for those."""


@dataclass(frozen=True)
class Schedule:
    """Ranks by how far their hosts are. Axes: ranks or streams, then actions done (or collectives ended)."""

    traces: Sequence[Trace]
    streams: list[Stream]
    code: Integers
    """[ranks, actions + 1]: what the host stands at."""
    stop: Integers
    """The next action that may block, from here on."""
    tail: Integers
    """Items put on the calculation stream."""
    event: Integers
    """Of a READ: how many items must be done."""
    meeting: Integers
    """Of a MEET: its number."""
    met: Integers
    """How many meetings this rank has come to, by number: all below this."""
    enqueued: Integers
    """[streams, actions + 1]"""
    needs: Integers
    """[streams, collectives + 1]: items of the calculation stream that must be done before one starts."""
    first_wait: Integers
    """[streams, collectives + 1]: the first item that waits for more than these collectives."""
    rank_of: Integers
    streams_of: Integers
    members: Integers
    queues: list[list[tuple[int, int]]]


def schedule_of(traces: Sequence[Trace]) -> Schedule:
    """Raises Mismatch where ranks call different things, SeveralCallers where this replay is not for them."""
    tables = tables_of(traces)
    meetings = _meetings(traces)
    hosts = [_Host(trace, meetings) for trace in traces]
    length = max(len(host.code) for host in hosts)
    most = max([1, *(len(stream.calls) for stream in tables.streams)])
    streams = [_stream_rows(hosts[stream.rank], stream, length, most) for stream in tables.streams]
    streams.append((np.zeros(length, np.int64), np.full(most + 1, _NEVER), np.full(most + 1, _NEVER)))
    places = {
        (stream.rank, call): (index, place)
        for index, stream in enumerate(tables.streams)
        for place, call in enumerate(stream.calls)
    }
    return Schedule(
        traces,
        tables.streams,
        *(_stacked([getattr(h, name) for h in hosts], length) for name in ("code", "stop", "tail", "event", "meeting")),
        met=_stacked([host.met for host in hosts], length),
        enqueued=np.stack([row[0] for row in streams]),
        needs=np.stack([row[1] for row in streams]),
        first_wait=np.stack([row[2] for row in streams]),
        rank_of=np.array([*(stream.rank for stream in tables.streams), 0]),
        streams_of=tables.streams_of,
        members=tables.members,
        queues=[
            [(KERNEL, 0) if call < 0 else places[host.trace.rank, call] for call in host.queue] for host in hosts
        ],
    )


def _meetings(traces: Sequence[Trace]) -> dict[str, int]:
    """Meetings by name, in the order in which every rank comes to them."""
    orders = [[what for what, _ in sorted(_reached(trace).items(), key=lambda item: item[1])] for trace in traces]
    if any(order != orders[0] for order in orders):
        raise SeveralCallers("the ranks come to their meetings in different orders")
    return {what: number for number, what in enumerate(orders[0])}


def _reached(trace: Trace) -> dict[str, tuple[int, int]]:
    """By meeting: how many actions the computing thread has done when this rank comes to it, and which one it is."""
    reached: dict[str, tuple[int, int]] = {}
    for index, action in enumerate(trace.threads[COMPUTING]):
        if action.op is Op.MEET:
            reached[action.what] = index, 0
    for name, actions in trace.threads.items():
        handed_over = 0
        for index, action in enumerate(actions if name != COMPUTING else ()):
            if action.op is Op.AFTER and action.what == COMPUTING:
                handed_over = action.number
            elif action.op is Op.MEET:
                reached[action.what] = handed_over, index
            else:
                raise SeveralCallers(f"rank {trace.rank}: thread {name} does {action.op.name}")
    return reached


class _Host:
    """One computing thread, by actions done."""

    def __init__(self, trace: Trace, meetings: dict[str, int]) -> None:
        self.trace, self._meetings = trace, meetings
        self.queue: list[int] = []
        self.code: list[int] = []
        self.tail: list[int] = []
        self.event: list[int] = []
        self.meeting: list[int] = []
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

    def _note(self, code: int, event: int = 0, meeting: int = 0) -> None:
        self.code.append(code)
        self.tail.append(len(self.queue))
        self.event.append(event)
        self.meeting.append(meeting)

    def _stand_at(self, action: Action) -> None:
        match action.op:
            case Op.SYNC:
                self._note(_SYNC)
            case Op.READ:
                self._note(_READ, event=self._events[action.number])
            case Op.MEET:
                self._note(_MEET, meeting=self._meetings[action.what])
            case Op.AFTER:
                before = self.trace.threads[action.what][: action.number]
                met = [other.what for other in before if other.op is Op.MEET]
                self._note(_MEET, meeting=self._meetings[met[-1]]) if met else self._note(_FREE)
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


def _stream_rows(host: _Host, stream: Stream, length: int, most: int) -> tuple[Any, Any, Any]:
    begun = [host.begun[call] for call in stream.calls]
    enqueued = np.searchsorted([done for done, _ in begun], np.arange(length), side="right")
    needs = np.array([*(need for _, need in begun), *[_NEVER] * (most + 1 - len(begun))])
    place_of = {call: place for place, call in enumerate(stream.calls)}
    first_wait = np.full(most + 1, _NEVER)
    for position in range(len(host.queue) - 1, -1, -1):
        place = place_of.get(host.queue[position], -1)
        first_wait[: place + 1] = position
    return enqueued, needs, first_wait


def _stacked(rows: Sequence[Sequence[int]], length: int) -> Integers:
    return np.array([[*row, *[row[-1]] * (length - len(row))] for row in rows], np.int64)


def replay_quickly(
    schedule: Schedule,
    interleavings: int,
    seed: int,
    one_resident: bool = True,
    on_done: Callable[[int], None] | None = None,
) -> Found:
    """As `replay.replay`."""
    state = _State(schedule, interleavings, np.random.default_rng(seed), one_resident)
    found = Found(interleavings)
    while state.size:
        over = ~state.turn()
        if np.count_nonzero(over) < max(1, state.size // 8):
            continue
        for one in np.flatnonzero(over & ~state.is_complete()):
            found.deadlocks += 1
            found.example = found.example or state.describe(int(one))
        if on_done is not None:
            on_done(int(np.count_nonzero(over)))
        state.keep(~over)
    return found


class _State:
    """Of many interleavings: the first axis of every array. What is over changes no more."""

    def __init__(self, schedule: Schedule, size: int, random: np.random.Generator, one_resident: bool) -> None:
        self._of, self._random, self._one_resident = schedule, random, one_resident
        ranks, streams = len(schedule.traces), len(schedule.streams) + 1
        self._ranks, self._streams = np.arange(ranks), np.arange(streams)
        self.done, self.head = np.zeros((size, ranks), np.int64), np.zeros((size, ranks), np.int64)
        self.started, self.ended = np.zeros((size, streams), np.int64), np.zeros((size, streams), np.int64)
        self.host_pace, self.device_pace = (random.choice(PACES, (size, ranks)) for _ in range(2))
        self.start_pace, self.end_pace = (random.choice(PACES, (size, streams)) for _ in range(2))

    @property
    def size(self) -> int:
        return len(self.done)

    def keep(self, which: Booleans) -> None:
        for name, value in vars(self).items():
            if not name.startswith("_"):
                setattr(self, name, value[which])

    def turn(self) -> Booleans:
        """Let some of those go on that can; by interleaving, whether anybody could."""
        of, ranks = self._of, self._ranks
        enqueued, tail = self._enqueued(), of.tail[ranks, self.done]
        steps = self._host_steps(enqueued, tail)
        limit = of.first_wait[self._streams, self.ended][:, of.streams_of].min(2)
        moves = np.minimum(limit, tail) - self.head
        starts, ends = self._starts(enqueued), self._ends()
        anybody: Booleans = steps.any(1) | moves.any(1) | starts.any(1) | ends.any(1)
        self.done += self._some(steps, self.host_pace)
        self.head += self._some(moves, self.device_pace)
        starts &= self._random.random(starts.shape, np.float32) < self.start_pace
        self.started += self._one_each(starts) if self._one_resident else starts
        self.ended += ends & (self._random.random(ends.shape, np.float32) < self.end_pace)
        return anybody

    def _some(self, most: Any, pace: Any) -> Any:
        """A random number up to ``most``; often none, and often all."""
        share = self._random.random(most.shape, np.float32) / pace
        return np.where(share < 1, np.ceil(most * np.minimum(2 * share, 1)), 0).astype(np.int64)

    def _enqueued(self) -> Any:
        return self._of.enqueued[self._streams, self.done[:, self._of.rank_of]]

    def _host_steps(self, enqueued: Any, tail: Any) -> Any:
        """[interleavings, ranks]: how many actions each host can do now."""
        of, ranks = self._of, self._ranks
        steps = of.stop[ranks, self.done] - self.done
        codes = of.code[ranks, self.done]
        if (codes == _SYNC).any():
            steps += (codes == _SYNC) & self._drained(enqueued, tail)
        steps += (codes == _READ) & (self.head >= of.event[ranks, self.done])
        met = of.met[ranks, self.done].min(1)
        steps += (codes == _MEET) & (of.meeting[ranks, self.done] < met[:, None])
        return steps

    def _drained(self, enqueued: Any, tail: Any) -> Booleans:
        drained: Booleans = (self.head == tail) & (self.ended == enqueued)[:, self._of.streams_of].all(2)
        return drained

    def _starts(self, enqueued: Any) -> Any:
        of = self._of
        idle = self.started == self.ended
        can = idle & (enqueued > self.started)
        can &= self.head[:, of.rank_of] >= of.needs[self._streams, self.started]
        if self._one_resident:
            can &= idle[:, of.streams_of].all(2)[:, of.rank_of]
        return can

    def _ends(self) -> Any:
        return (self.started > self.ended) & (self.started[:, self._of.members].min(2) >= self.started)

    def _one_each(self, starts: Any) -> Any:
        """One of those on the same rank."""
        of_rank = starts[:, self._of.streams_of]
        if of_rank.shape[2] == 1:
            return starts
        keys = of_rank * (1.0 + self._random.random(of_rank.shape, np.float32))
        chosen = np.zeros_like(starts)
        rows, ranks = np.nonzero(of_rank.any(2))
        chosen[rows, self._of.streams_of[ranks, keys[rows, ranks].argmax(1)]] = True
        return chosen

    def is_complete(self) -> Booleans:
        """By interleaving: everything is done."""
        ended = (self._of.code[self._ranks, self.done] == _END).all(1)
        complete: Booleans = ended & self._drained(self._enqueued(), self._of.tail[self._ranks, self.done]).all(1)
        return complete

    def describe(self, one: int) -> Standstill:
        of, done = self._of, self.done[one]
        tail = of.tail[self._ranks, done]
        return Standstill(
            done=done.tolist(),
            queued=[queue[head:end] for queue, head, end in zip(of.queues, self.head[one], tail, strict=True)],
            enqueued=self._enqueued()[one].tolist(),
            started=self.started[one].tolist(),
            ended=self.ended[one].tolist(),
            needs=of.needs.tolist(),
            passed=self.head[one].tolist(),
        )
