"""The traces of all ranks as integer arrays, for the replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.streams.trace import COMPUTING, Action, Op, Trace, mismatches

Integers = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger[Any]]]

# Codes of what a host thread does, as a replay knows them: a barrier is two of them, arriving and passing.
APPEND, BEGIN, RECORD, ARRIVE, SYNC, READ, AFTER, PASS, END = range(9)
FIRST_BLOCKING = SYNC
KERNEL = -1


class Mismatch(AssertionError):
    """Ranks call different collectives, or reach different barriers."""


@dataclass(frozen=True)
class Stream:
    """Of one communicator, on one rank."""

    rank: int
    group: int
    calls: tuple[int, ...]
    """Numbers of the rank's collectives, in order."""


@dataclass(frozen=True)
class Tables:
    """Threads and communicators' streams of all ranks are counted through.

    A thread's actions are ``code``, ``first``, ``second`` from ``offset[thread]`` on; they end with ``END``.
    APPEND: a kernel (-1) or a wait for position ``second`` of stream ``first``. BEGIN: on stream ``first``. RECORD,
    READ: event ``first``. ARRIVE, PASS: barrier ``first``. AFTER: thread ``first`` has done ``second`` actions.
    """

    traces: Sequence[Trace]
    threads: list[tuple[int, str]]
    """(rank, name) of each."""
    streams: list[Stream]
    actions: list[list[Action]]
    """By thread; what ``code`` was made of, for words."""
    offset: Integers
    code: Integers
    first: Integers
    second: Integers
    events: int
    barriers: int
    threads_of: Integers
    """[ranks, most threads of a rank]; the last thread, an empty one, where there are fewer."""
    streams_of: Integers
    """[ranks, most streams of a rank]; the last stream, an empty one, where there are fewer."""
    members: Integers
    """[streams, most ranks of a group]: streams of the same group, itself included."""

    @property
    def ranks(self) -> int:
        return len(self.traces)


def tables_of(traces: Sequence[Trace]) -> Tables:
    """Raises Mismatch where ranks call different things."""
    if found := mismatches(traces):
        raise Mismatch("; ".join(found))
    streams = streams_of(traces)
    _refuse_several_callers(traces)
    threads = [(trace.rank, name) for trace in traces for name in sorted(trace.threads, key=lambda n: n != COMPUTING)]
    coder = _Coder(traces, streams, threads)
    rows = [coder.thread(index) for index in range(len(threads))] + [[(END, 0, 0)]]
    flat = np.array([entry for row in rows for entry in row], np.int64)
    return Tables(
        traces,
        threads,
        streams,
        [list(_doubled(traces[rank].threads[name])) for rank, name in threads] + [[]],
        np.cumsum([0, *(len(row) for row in rows[:-1])]),
        code=flat[:, 0].copy(),
        first=flat[:, 1].copy(),
        second=flat[:, 2].copy(),
        events=coder.events,
        barriers=len(coder.barriers),
        threads_of=_padded([[i for i, (r, _) in enumerate(threads) if r == t.rank] for t in traces], len(threads)),
        streams_of=_padded([[i for i, s in enumerate(streams) if s.rank == t.rank] for t in traces], len(streams)),
        members=_padded(
            [[i for i, other in enumerate(streams) if other.group == stream.group] for stream in streams] + [[]], -1
        ),
    )


def streams_of(traces: Sequence[Trace]) -> list[Stream]:
    """All communicators' streams, rank by rank."""
    return [Stream(trace.rank, group, tuple(trace.of_group(group))) for trace in traces for group in trace.groups]


def _refuse_several_callers(traces: Sequence[Trace]) -> None:
    """A stream's order is that of one thread's calls, here; no engine has it otherwise."""
    for trace in traces:
        owner: dict[int, str] = {}
        for name, actions in trace.threads.items():
            for action in actions:
                if action.op is Op.BEGIN:
                    group = trace.calls[action.number].group
                    if owner.setdefault(group, name) != name:
                        raise Mismatch(f"rank {trace.rank}: two threads call on group {group}, in racing order")


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Integers:
    """``filler`` -1: the row's own index, so that a condition on all of a row is one more time that on itself."""
    width = max(1, *(len(row) for row in rows))
    return np.array(
        [[*row, *[index if filler < 0 else filler] * (width - len(row))] for index, row in enumerate(rows)], np.int64
    )


def _doubled(actions: Sequence[Action]) -> Sequence[Action]:
    """A barrier is two actions of a replay."""
    return [action for action in actions for _ in range(1 + (action.op is Op.BARRIER))]


class _Coder:
    """From actions to integers."""

    def __init__(self, traces: Sequence[Trace], streams: Sequence[Stream], threads: Sequence[tuple[int, str]]) -> None:
        self._traces, self._threads = traces, list(threads)
        self._places = {
            (stream.rank, call): (index, place)
            for index, stream in enumerate(streams)
            for place, call in enumerate(stream.calls)
        }
        self._events: dict[tuple[int, int], int] = {}
        self.barriers: dict[str, int] = {}

    @property
    def events(self) -> int:
        return len(self._events)

    def thread(self, index: int) -> list[tuple[int, int, int]]:
        rank, name = self._threads[index]
        codes = [code for action in self._traces[rank].threads[name] for code in self._of(rank, action)]
        return [*codes, (END, 0, 0)]

    def _of(self, rank: int, action: Action) -> list[tuple[int, int, int]]:
        match action.op:
            case Op.KERNEL:
                return [(APPEND, KERNEL, 0)]
            case Op.WAIT:
                return [(APPEND, *self._places[rank, action.number])]
            case Op.BEGIN:
                return [(BEGIN, *self._places[rank, action.number])]
            case Op.RECORD | Op.READ:
                event = self._events.setdefault((rank, action.number), len(self._events))
                return [(RECORD if action.op is Op.RECORD else READ, event, 0)]
            case Op.SYNC:
                return [(SYNC, 0, 0)]
            case Op.BARRIER:
                barrier = self.barriers.setdefault(action.what, len(self.barriers))
                return [(ARRIVE, barrier, 0), (PASS, barrier, 0)]
            case Op.AFTER:
                others = self._traces[rank].threads[action.what][: action.number]
                return [(AFTER, self._threads.index((rank, action.what)), len(_doubled(others)))]
