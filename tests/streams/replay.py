"""Replays the traces of all ranks together, many random interleavings at a time.

What each rule follows from (Paddle 3.3.1, ``process_group_nccl.cc``; CUDA; NCCL's documentation):

- A call with ``sync_op=False`` remembers where the calculation stream is, the group's stream waits for that, and the
  collective stands behind it: a collective may start when the calculation stream has done what it held at the call.
- ``task.wait()`` lets the calculation stream, not the host, wait for the collective. ``sync_op=True`` is both at once.
- A stream does what is on it in order. A collective is resident from its start until the same one of the group has
  started on all ranks of the group, and may then end.
- One resident collective per device (``one_resident``): NCCL does not promise that kernels of two communicators run
  side by side on a device. Without it, each device runs as many as there are communicators.
- The host never blocks in a call; it waits where it reads a value (for all that the device holds, Paddle's streams are
  blocking ones), for an event, and at a barrier of all ranks.

One thread of a rank calls. So how much stands on each stream follows from how far the host is: a host does a random
number of actions in a turn, and a calculation stream goes on by a random number of items. Other threads only wait at
barriers: who waits for their result waits until all ranks have handed that barrier over.

In each turn every host, calculation stream and communicator's stream that can go on does so with a probability of its
own. What can go on stays able to until it does, but for one choice: which collective becomes resident. So turns of
several are sequences of one, and a replay in which nothing can go on and something is left stands still for ever.
Without ``one_resident`` there is no choice at all, and one interleaving decides for every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.streams.trace import COMPUTING, KERNEL, Action, Op, Standstill, Stream, Trace, mismatches, streams_of

Booleans = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger[Any]]]

# Probabilities with which somebody who can go on does: a pace is drawn for each rank's hosts, device and streams.
PACES = np.array([0.3, 0.7, 1.0], np.float32)
_FREE, _SYNC, _READ, _BARRIER, _END = range(5)
_NEVER = 1 << 30
_STOP, _CODE, _TAIL, _EVENT, _BARRIER_NUMBER, _MET, _ENQUEUED = range(7)
"""Columns of ``Schedule.hosts``. The next action that may block; what the host stands at; items put on the calculation
stream; of a READ: how many of them must be done; of a BARRIER: its number; how many barriers this rank has come to;
collectives enqueued, from here on one column for each of the rank's streams."""


class Mismatch(AssertionError):
    """Ranks call different collectives, or reach different barriers, or several threads of a rank call."""


@dataclass
class Found:
    """What replays have found."""

    interleavings: int = 0
    deadlocks: int = 0
    example: Standstill | None = None

    def add(self, other: Found) -> None:
        self.interleavings += other.interleavings
        self.deadlocks += other.deadlocks
        self.example = self.example or other.example


@dataclass(frozen=True)
class Schedule:
    """Ranks by how far their hosts are, and their communicators' streams by how many collectives have ended."""

    traces: Sequence[Trace]
    streams: list[Stream]
    slots: list[int]
    """Of each stream: rank * width + number of the rank's stream."""
    groups: list[Integers]
    """Of each group, the slots that are its streams."""
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


def schedule_of(traces: Sequence[Trace]) -> Schedule:
    if found := mismatches(traces):
        raise Mismatch("; ".join(found))
    streams = streams_of(traces)
    barriers = _barriers(traces)
    hosts = [_Host(trace, barriers) for trace in traces]
    length = max(len(host.rows) for host in hosts)
    most = 1 + max([1, *(len(stream.calls) for stream in streams)])
    of_rank = [[stream for stream in streams if stream.rank == trace.rank] for trace in traces]
    width = max([1, *map(len, of_rank)])
    slots = [stream.rank * width + of_rank[stream.rank].index(stream) for stream in streams]
    places = {(s.rank, call): (index, place) for index, s in enumerate(streams) for place, call in enumerate(s.calls)}
    calls = np.full((len(traces) * width, most, 2), _NEVER, np.int32)
    for slot, stream in zip(slots, streams, strict=True):
        hosts[stream.rank].write_calls(calls[slot], stream)
    return Schedule(
        traces,
        streams,
        slots,
        [
            np.array([slot for slot, stream in zip(slots, streams, strict=True) if stream.group == group])
            for group in sorted({stream.group for stream in streams})
        ],
        width,
        np.concatenate(
            [host.table(own, length, width) for host, own in zip(hosts, of_rank, strict=True)],
        ).T.copy(),
        length,
        calls.reshape(-1, 2).T.copy(),
        most,
        [[(KERNEL, 0) if call < 0 else places[host.trace.rank, call] for call in host.queue] for host in hosts],
    )


def _barriers(traces: Sequence[Trace]) -> dict[str, int]:
    """Barriers by name, in the order in which every rank reaches them."""
    orders = [[what for what, _ in sorted(_reached(trace).items(), key=lambda item: item[1])] for trace in traces]
    if any(order != orders[0] for order in orders):
        raise Mismatch("the ranks reach their barriers in different orders")
    return {what: number for number, what in enumerate(orders[0])}


def _reached(trace: Trace) -> dict[str, tuple[int, int]]:
    """By barrier: how many actions the computing thread has done when this rank reaches it, and which one it is."""
    reached = {one.what: (at, 0) for at, one in enumerate(trace.threads[COMPUTING]) if one.op is Op.BARRIER}
    for name, actions in trace.threads.items():
        handed_over = 0
        for index, action in enumerate(actions if name != COMPUTING else ()):
            if action.op is Op.AFTER and action.what == COMPUTING:
                handed_over = action.number
            elif action.op is Op.BARRIER:
                reached[action.what] = handed_over, index
            else:
                raise Mismatch(f"rank {trace.rank}: thread {name} does {action.op.name}")
    return reached


class _Host:
    """One computing thread, by actions done."""

    def __init__(self, trace: Trace, barriers: dict[str, int]) -> None:
        self.trace, self._barriers = trace, barriers
        self.queue: list[int] = []
        self.rows: list[tuple[int, int, int, int]] = []
        """Code, tail, event, barrier's number."""
        self.begun: dict[int, tuple[int, int]] = {}
        """By collective: (actions done behind its call, items that it needs)."""
        self._events: dict[int, int] = {}
        for action in trace.threads[COMPUTING]:
            self._stand_at(action)
            match action.op:
                case Op.KERNEL:
                    self.queue.append(KERNEL)
                case Op.WAIT:
                    self.queue.append(action.number)
                case Op.BEGIN:
                    self.begun[action.number] = len(self.rows), len(self.queue)
                case Op.RECORD:
                    self._events[action.number] = len(self.queue)
        self._note(_END)

    def _note(self, code: int, event: int = 0, barrier: int = 0) -> None:
        self.rows.append((code, len(self.queue), event, barrier))

    def _stand_at(self, action: Action) -> None:
        met = [action.what] if action.op is Op.BARRIER else []
        if action.op is Op.AFTER:
            before = self.trace.threads[action.what][: action.number]
            met = [other.what for other in before if other.op is Op.BARRIER]
        if met:
            self._note(_BARRIER, barrier=self._barriers[met[-1]])
        elif action.op is Op.READ:
            self._note(_READ, event=self._events[action.number])
        else:
            self._note(_SYNC if action.op is Op.SYNC else _FREE)

    def table(self, streams: Sequence[Stream], length: int, width: int) -> Integers:
        """A row for each number of actions done, the last one repeated up to ``length``."""
        code, tail, event, barrier = np.array([*self.rows, *[self.rows[-1]] * (length - len(self.rows))]).T
        last = len(self.rows) - 1
        may_block = np.flatnonzero(code != _FREE)
        stop = np.minimum(may_block[np.searchsorted(may_block, np.arange(length))], last)
        reached = sorted(index for index, _ in _reached(self.trace).values())
        met = np.searchsorted(reached, np.minimum(np.arange(length), last), side="right")
        begun = [[self.begun[call][0] for call in stream.calls] for stream in streams]
        enqueued = [np.searchsorted(of, np.arange(length), side="right") for of in begun]
        nothing = [np.zeros(length, int)] * (width - len(streams))
        return np.stack([stop, code, tail, event, barrier, met, *enqueued, *nothing], 1).astype(np.int32)

    def write_calls(self, rows: Integers, stream: Stream) -> None:
        rows[: len(stream.calls), 0] = [self.begun[call][1] for call in stream.calls]
        place_of = {call: place for place, call in enumerate(stream.calls)}
        for position in range(len(self.queue) - 1, -1, -1):
            rows[: place_of.get(self.queue[position], -1) + 1, 1] = position


def replay(
    schedule: Schedule,
    interleavings: int,
    random: np.random.Generator,
    one_resident: bool = True,
) -> Found:
    """Let so many interleavings go on until nothing can."""
    state, found = _State(schedule, interleavings, random, one_resident), Found(interleavings)
    while state.size:
        over = ~state.turn()
        if np.count_nonzero(over) < max(1, state.size // 8):
            continue
        for one in np.flatnonzero(over & ~state.is_complete()):
            found.deadlocks += 1
            found.example = found.example or state.describe(int(one))
        state.keep(~over)
    return found


def _part(most: Any, share: Any, who: Any) -> Any:
    """How much those do who go on: half of them all that they can, the others a part."""
    part = np.minimum(np.ceil(most * share), most).astype(np.int32)
    return np.maximum(part, 1, out=part) * who


class _State:
    """Of many interleavings: the last axis of every array. What is over changes no more."""

    def __init__(self, schedule: Schedule, size: int, random: np.random.Generator, one_resident: bool) -> None:
        self._of, self._random, self._one_resident = schedule, random, one_resident
        ranks, slots = len(schedule.traces), len(schedule.traces) * schedule.width
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
        columns = [self._column(_ENQUEUED + number, rows) for number in range(self._of.width)]
        return np.stack(columns, 1).reshape(self.started.shape)

    def _calls(self) -> tuple[Any, Any]:
        """[slots, interleavings]: items that the next collective needs; the first item that waits for it."""
        rows = self.ended + self._first_call
        return self._of.calls[0].take(rows), self._of.calls[1].take(rows)

    def _by_rank(self, slots: Any) -> Any:
        return slots.reshape(len(self._of.traces), self._of.width, -1)

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
        of, rows = self._of, (self.done + self._first_row)[:, [one]]
        tail = self._column(_TAIL, rows)[:, 0]
        enqueued = np.stack([self._column(_ENQUEUED + number, rows)[:, 0] for number in range(of.width)], 1).ravel()
        return Standstill(
            list(of.traces),
            of.streams,
            self.done[:, one].tolist(),
            [queue[h:t] for queue, h, t in zip(of.queues, self.head[:, one], tail, strict=True)],
            enqueued[of.slots].tolist(),
            self.started[of.slots, one].tolist(),
            self.ended[of.slots, one].tolist(),
            of.calls[0].reshape(-1, of.most)[of.slots].tolist(),
            self.head[:, one].tolist(),
        )
