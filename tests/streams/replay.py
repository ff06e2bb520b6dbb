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
  blocking ones), for an event, at a barrier of all ranks, and for another thread's result.

In each turn every host, calculation stream and communicator's stream that can go on does so with a probability of its
own. What can go on stays able to until it does, but for two choices: which of a rank's threads calls next, and which
collective becomes resident. So turns of several are sequences of one, and a replay in which nothing can go on and
something is left stands still for ever. With one calling thread and no ``one_resident`` there is no choice at all, and
one interleaving decides for every other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tests.streams.tables import (
    AFTER,
    APPEND,
    ARRIVE,
    BEGIN,
    END,
    FIRST_BLOCKING,
    KERNEL,
    PASS,
    READ,
    RECORD,
    SYNC,
    Tables,
)
from tests.streams.trace import Action
from tests.streams.words import Standstill

Booleans = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

# Probabilities with which somebody who can go on does: a pace is drawn for each rank's hosts, device and streams.
PACES = np.array([0.3, 0.7, 1.0], np.float32)


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


class State(Protocol):
    """Where many interleavings stand."""

    @property
    def size(self) -> int:
        """How many there are."""

    def turn(self) -> Booleans:
        """Let each go on a little; which ones could."""

    def is_complete(self) -> Booleans:
        """Which have nothing left to do."""

    def describe(self, one: int) -> Standstill:
        """Who waits for whom in an interleaving."""

    def keep(self, which: Booleans) -> None:
        """Drop the others."""


def replay(tables: Tables, interleavings: int, random: np.random.Generator, one_resident: bool = True) -> Found:
    """Replay that many random interleavings."""
    return run_to_the_end(_State(tables, interleavings, random, one_resident))


def run_to_the_end(state: State, on_done: Callable[[int], None] = lambda _: None) -> Found:
    """Let all interleavings go on until nothing can; ``on_done`` is told how many more are over."""
    found = Found(state.size)
    while state.size:
        over = ~state.turn()
        if np.count_nonzero(over) < max(1, state.size // 8):
            continue
        for one in np.flatnonzero(over & ~state.is_complete()):
            found.deadlocks += 1
            found.example = found.example or state.describe(int(one))
        on_done(int(np.count_nonzero(over)))
        state.keep(~over)
    return found


class _State:
    """Of many interleavings: the first axis of every array. What is over changes no more."""

    def __init__(self, tables: Tables, size: int, random: np.random.Generator, one_resident: bool) -> None:
        self._tables, self._random, self._one_resident = tables, random, one_resident
        threads, streams, ranks = len(tables.threads) + 1, len(tables.streams) + 1, tables.ranks
        longest = max([1, *(len(stream.calls) for stream in tables.streams)])
        self._rank_of_stream = np.array([*(stream.rank for stream in tables.streams), 0])
        self._rank_of_thread = np.array([*(rank for rank, _ in tables.threads), 0])
        self.done = np.zeros((size, threads), np.int32)
        self.queue = np.zeros((size, ranks, _most_appended(tables), 2), np.int16)
        self.tail, self.head = np.zeros((size, ranks), np.int32), np.zeros((size, ranks), np.int32)
        self.enqueued, self.started, self.ended = (np.zeros((size, streams), np.int32) for _ in range(3))
        self.needs = np.zeros((size, streams, longest + 1), np.int32)
        self.event = np.zeros((size, max(tables.events, 1)), np.int32)
        self.arrived = np.zeros((size, max(tables.barriers, 1)), np.int32)
        self._parts = [ranks, 2 * ranks, 2 * ranks + streams]
        self.pace = random.choice(PACES, (size, 2 * ranks + 2 * streams))

    @property
    def size(self) -> int:
        return len(self.done)

    def keep(self, which: Booleans) -> None:
        for name, value in vars(self).items():
            if not name.startswith("_"):
                setattr(self, name, value[which])

    def turn(self) -> Any:
        """Let some of those go on that can, and all of them if that is nobody; by interleaving, whether anybody can."""
        able, threads = self._hosts()
        moves, starts, ends = self._moves(), self._starts(), self._ends()
        can = np.concatenate([able, moves, starts, ends], axis=1)
        some: Any = can & (self._random.random(can.shape, np.float32) < self.pace)
        some |= can & ~some.any(1)[:, None]
        hosts, moves, starts, ends = np.split(some, self._parts, axis=1)
        called = np.nonzero(hosts)
        self._act(called[0], threads[called])
        self.head += moves
        self.started += self._one_each(starts) if self._one_resident else starts
        self.ended += ends
        return can.any(1)

    def is_complete(self) -> Booleans:
        """By interleaving: everything is done."""
        complete: Booleans = (self._codes() == END).all(1) & self._drained().all(1)
        return complete

    def describe(self, one: int) -> Standstill:
        of = self._tables
        at = {
            host: _whole(actions, done)
            for host, actions, done in zip(of.threads, of.actions, self.done[one].tolist(), strict=False)
        }
        queues = zip(self.queue[one].tolist(), self.head[one].tolist(), self.tail[one].tolist(), strict=True)
        return Standstill(
            list(of.traces),
            of.streams,
            at,
            [[(stream, place) for stream, place in queue[head:tail]] for queue, head, tail in queues],
            self.enqueued[one].tolist(),
            self.started[one].tolist(),
            self.ended[one].tolist(),
            self.needs[one].tolist(),
            self.head[one].tolist(),
        )

    def _codes(self) -> Any:
        return self._tables.code[self._tables.offset + self.done]

    def _drained(self) -> Booleans:
        """[interleavings, ranks]: whether nothing is left on the rank's streams."""
        idle = (self.ended == self.enqueued)[:, self._tables.streams_of].all(2)
        drained: Booleans = (self.head == self.tail) & idle
        return drained

    def _hosts(self) -> tuple[Booleans, Any]:
        """[interleavings, ranks]: whether a thread of the rank can go on, and which one of those that can."""
        codes = self._codes()
        can = codes < FIRST_BLOCKING
        rows, threads = np.nonzero((codes >= FIRST_BLOCKING) & (codes != END))
        can[rows, threads] = self._is_over(rows, threads, codes[rows, threads])
        of_rank = can[:, self._tables.threads_of]
        if of_rank.shape[2] == 1:
            chosen = np.zeros(of_rank.shape[:2], np.int64)
        else:
            chosen = (of_rank * (1.0 + self._random.random(of_rank.shape, np.float32))).argmax(2)
        return of_rank.any(2), self._tables.threads_of[np.arange(self._tables.ranks), chosen]

    def _is_over(self, rows: Any, threads: Any, codes: Any) -> Booleans:
        """Whether what these threads wait for has come."""
        entries = self._tables.offset[threads] + self.done[rows, threads]
        first, second = self._tables.first[entries], self._tables.second[entries]
        over = np.zeros(len(rows), np.bool_)
        ranks = self._rank_of_thread[threads]
        for code in np.unique(codes):
            of = codes == code
            row, one = rows[of], first[of]
            if code == SYNC:
                over[of] = self._drained()[row, ranks[of]]
            elif code == READ:
                over[of] = self.head[row, ranks[of]] >= self.event[row, one]
            elif code == AFTER:
                over[of] = self.done[row, one] >= second[of]
            elif code == PASS:
                over[of] = self.arrived[row, one] == self._tables.ranks
        return over

    def _moves(self) -> Booleans:
        """[interleavings, ranks]: whether the calculation stream can end what it is at."""
        has = self.head < self.tail
        rows, ranks = np.nonzero(has)
        streams, places = self.queue[rows, ranks, self.head[rows, ranks]].T
        has[rows, ranks] = (streams == KERNEL) | (self.ended[rows, streams] > places)
        return has

    def _starts(self) -> Any:
        """[interleavings, streams]: whether the collective at the head may become resident."""
        can = (self.enqueued > self.started) & (self.started == self.ended)
        if self._one_resident:
            is_free = (self.started == self.ended)[:, self._tables.streams_of].all(2)
            can &= is_free[:, self._rank_of_stream]
        rows, streams = np.nonzero(can)
        needs = self.needs[rows, streams, self.started[rows, streams]]
        can[rows, streams] = self.head[rows, self._rank_of_stream[streams]] >= needs
        return can

    def _one_each(self, starts: Any) -> Any:
        """One of those on the same rank."""
        of_rank = starts[:, self._tables.streams_of]
        keys = of_rank * (1.0 + self._random.random(of_rank.shape, np.float32))
        rows, ranks = np.nonzero(of_rank.any(2))
        chosen = np.zeros_like(starts)
        chosen[rows, self._tables.streams_of[ranks, keys[rows, ranks].argmax(1)]] = True
        return chosen

    def _ends(self) -> Any:
        """[interleavings, streams]: whether the resident collective is so on all ranks of its group."""
        ends: Booleans = (self.started > self.ended) & (self.started[:, self._tables.members].min(2) >= self.started)
        return ends

    def _act(self, rows: Any, threads: Any) -> None:
        """These threads do what is next; one thread of a rank at most."""
        entries = self._tables.offset[threads] + self.done[rows, threads]
        codes, firsts = self._tables.code[entries], self._tables.first[entries]
        self.done[rows, threads] += 1
        ranks = self._rank_of_thread[threads]
        for code, act in ((APPEND, self._append), (BEGIN, self._enqueue), (RECORD, self._record)):
            of = np.flatnonzero(codes == code)
            if len(of):
                act(rows[of], ranks[of], firsts[of], self._tables.second[entries[of]])
        came = codes == ARRIVE
        np.add.at(self.arrived, (rows[came], firsts[came]), 1)

    def _append(self, rows: Any, ranks: Any, streams: Any, places: Any) -> None:
        tail = self.tail[rows, ranks]
        self.queue[rows, ranks, tail, 0] = streams
        self.queue[rows, ranks, tail, 1] = places
        self.tail[rows, ranks] += 1

    def _enqueue(self, rows: Any, ranks: Any, streams: Any, places: Any) -> None:
        self.needs[rows, streams, places] = self.tail[rows, ranks]
        self.enqueued[rows, streams] += 1

    def _record(self, rows: Any, ranks: Any, events: Any, _: Any) -> None:
        self.event[rows, events] = self.tail[rows, ranks]


def _whole(actions: Sequence[Action], done: int) -> int:
    """How many of a trace's actions are done: a barrier is there twice, and done when both are."""
    begun = sum(action is not before for action, before in zip(actions[:done], [None, *actions], strict=False))
    return begun - (0 < done < len(actions) and actions[done] is actions[done - 1])


def _most_appended(tables: Tables) -> int:
    """To a rank's calculation stream."""
    counts = np.zeros(tables.ranks, np.int64)
    for (rank, _), begin, end in zip(tables.threads, tables.offset, tables.offset[1:], strict=False):
        counts[rank] += np.count_nonzero(tables.code[begin:end] == APPEND)
    return int(counts.max()) + 1
