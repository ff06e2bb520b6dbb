"""How long the calculation stream waits: traces with durations, on one link, without randomness."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.streams.trace import COMPUTING, Action, Call, Op, Trace


@dataclass(frozen=True)
class Rates:
    """Durations in seconds. What one operator of the program costs its device, what an action costs the host, and the
    link: so slow that a dense step communicates for about as long as its backward pass computes."""

    kernel: float = 30e-6
    host: float = 3e-6
    barrier: float = 100e-6
    latency: float = 30e-6
    bytes_per_second: float = 60e6

    def of(self, call: Call) -> float:
        """A collective's time. Source: the usual counts of bytes that each rank sends for a ring."""
        ranks = len(call.ranks)
        kind = call.signature.partition(" ")[0]
        share = (ranks - 1) / ranks
        rounds = {"all_reduce": 2 * share, "all_gather": ranks - 1.0, "all_to_all": share}.get(kind, 1.0)
        return self.latency + rounds * call.nbytes / self.bytes_per_second


@dataclass
class _Thread:
    rank: int
    name: str
    actions: Sequence[Action]
    done: int = 0
    free_at: float = 0.0
    is_at_barrier: bool = False


@dataclass
class _Calculation:
    """A rank's calculation stream: operators (-1, how many) and waits (collective, 0)."""

    queue: list[tuple[int, int]]
    head: int = 0
    free_at: float = 0.0


class Simulation:
    """A rank's collectives run one at a time, in the order in which they can start: that is the link."""

    def __init__(self, traces: Sequence[Trace], rates: Rates, communicates: bool = True) -> None:
        self._traces, self._rates, self._communicates = traces, rates, communicates
        self._threads = [
            _Thread(trace.rank, name, trace.threads[name])
            for trace in traces
            for name in sorted(trace.threads, key=lambda n: n != COMPUTING)
        ]
        self._by_name = {(thread.rank, thread.name): thread for thread in self._threads}
        self._calculation = [_Calculation([]) for _ in traces]
        self._needs: list[dict[int, int]] = [{} for _ in traces]
        self._over: list[dict[int, float]] = [{} for _ in traces]
        """By rank and collective, when it ends; from its start on."""
        self._orders = {(trace.rank, group): trace.of_group(group) for trace in traces for group in trace.groups}
        self._next = dict.fromkeys(self._orders, 0)
        self._link = [0.0 for _ in traces]
        self._arrived: dict[str, list[float]] = {}
        self._events: list[dict[int, int]] = [{} for _ in traces]
        self._now = 0.0

    def seconds(self) -> float:
        """Until everything is done."""
        while True:
            while self._advance():
                pass
            later = [t for t in self._times() if t > self._now]
            if not later:
                break
            self._now = min(later)
        assert all(thread.done == len(thread.actions) for thread in self._threads), "stands still"
        return self._now

    def _times(self) -> list[float]:
        ends = [end for over in self._over for end in over.values()]
        barriers = [max(times) + self._rates.barrier for times in self._arrived.values()]
        free = [thread.free_at for thread in self._threads] + [stream.free_at for stream in self._calculation]
        return [*ends, *barriers, *free]

    def _advance(self) -> bool:
        moved = [self._host(thread) for thread in self._threads]
        moved += [self._calculate(rank) for rank in range(len(self._traces))]
        return self._start_first() or any(moved)

    def _host(self, thread: _Thread) -> bool:
        if thread.free_at > self._now or thread.done == len(thread.actions):
            return False
        action = thread.actions[thread.done]
        if not self._can(thread, action):
            return False
        thread.done += 1
        thread.is_at_barrier = False
        thread.free_at = self._now + self._rates.host * max(action.amount, 1)
        self._put(thread.rank, action)
        return True

    def _can(self, thread: _Thread, action: Action) -> bool:
        calculation = self._calculation[thread.rank]
        match action.op:
            case Op.READ:
                return calculation.head >= self._events[thread.rank][action.number] and calculation.free_at <= self._now
            case Op.SYNC:
                return self._is_idle(thread.rank)
            case Op.AFTER:
                other = self._by_name[thread.rank, action.what]
                return other.done >= action.number and other.free_at <= self._now
            case Op.BARRIER:
                return self._has_met(thread, action.what)
        return True

    def _has_met(self, thread: _Thread, barrier: str) -> bool:
        times = self._arrived.setdefault(barrier, [])
        if not thread.is_at_barrier:
            thread.is_at_barrier = True
            times.append(self._now)
        cost = self._rates.barrier if self._communicates else 0.0
        return len(times) == len(self._traces) and self._now >= max(times) + cost

    def _is_idle(self, rank: int) -> bool:
        calculation = self._calculation[rank]
        if calculation.head < len(calculation.queue) or calculation.free_at > self._now:
            return False
        return all(self._over[rank].get(call, math.inf) <= self._now for call in self._needs[rank])

    def _put(self, rank: int, action: Action) -> None:
        queue = self._calculation[rank].queue
        match action.op:
            case Op.KERNEL:
                queue.append((-1, action.amount))
            case Op.WAIT:
                queue.append((action.number, 0))
            case Op.BEGIN:
                self._needs[rank][action.number] = len(queue)
            case Op.RECORD:
                self._events[rank][action.number] = len(queue)

    def _calculate(self, rank: int) -> bool:
        stream = self._calculation[rank]
        if stream.head == len(stream.queue) or stream.free_at > self._now:
            return False
        call, operators = stream.queue[stream.head]
        if call >= 0 and self._over[rank].get(call, math.inf) > self._now:
            return False
        stream.head += 1
        stream.free_at = self._now + (operators * self._rates.kernel if call < 0 else 0.0)
        return True

    def _start_first(self) -> bool:
        """Start the collective that can start on all of its ranks; the one that needs least of the program first."""
        able = [(self._needs[trace.rank][call], key) for trace in self._traces for key, call in self._ready(trace.rank)]
        for _, (rank, group) in sorted(able):
            order = self._next[rank, group]
            call = self._traces[rank].calls[self._orders[rank, group][order]]
            if all((self._next[r, group] == order and self._is_ready(r, group)) for r in call.ranks):
                self._start(call, group, order)
                return True
        return False

    def _ready(self, rank: int) -> list[tuple[tuple[int, int], int]]:
        return [
            (key, self._orders[key][self._next[key]]) for key in self._orders if key[0] == rank and self._is_ready(*key)
        ]

    def _is_ready(self, rank: int, group: int) -> bool:
        order, place = self._orders[rank, group], self._next[rank, group]
        if place == len(order) or self._link[rank] > self._now or order[place] not in self._needs[rank]:
            return False
        need, stream = self._needs[rank][order[place]], self._calculation[rank]
        return stream.head > need or (stream.head == need and stream.free_at <= self._now)

    def _start(self, call: Call, group: int, place: int) -> None:
        end = self._now + (self._rates.of(call) if self._communicates else 0.0)
        for rank in call.ranks:
            self._over[rank][self._orders[rank, group][place]] = end
            self._link[rank] = end
            self._next[rank, group] += 1


def exposed_seconds(traces: Sequence[Trace], rates: Rates) -> float:
    """What communication adds to the time of these traces."""
    return Simulation(traces, rates).seconds() - Simulation(traces, rates, communicates=False).seconds()


def communication_seconds(trace: Trace, rates: Rates) -> float:
    """All collectives of a rank's trace, one after the other."""
    begun = [action.number for actions in trace.threads.values() for action in actions if action.op is Op.BEGIN]
    return sum(rates.of(trace.calls[number]) for number in begun)


def ideal_exposed_seconds(trace: Trace, rates: Rates) -> float:
    """Of the best schedule with the same link: a bucket travels as soon as its gradients are there, its later stages
    as soon as the earlier ones have ended, and the calculation waits only where the last result is used."""
    actions = trace.threads[COMPUTING]
    chains: dict[str, list[float]] = {}
    last: dict[str, int] = {}
    for run, number in _runs(trace):
        chains.setdefault(run, []).append(rates.of(trace.calls[number]))
        last[run] = number
    final = {number: run for run, number in last.items()}
    run_of = {number: run for run, number in _runs(trace)}
    link, begun, now, computed = _Link(), set(), 0.0, 0.0
    for action in actions:
        if action.op is Op.KERNEL:
            now, computed = now + action.amount * rates.kernel, computed + action.amount * rates.kernel
        elif action.op is Op.BEGIN and (run := run_of[action.number]) not in begun:
            begun.add(run)
            link.add(run, now, chains[run])
        elif action.op is Op.WAIT and action.number in final:
            now = max(now, link.end_of(final[action.number]))
    return now - computed


def _runs(trace: Trace) -> list[tuple[str, int]]:
    """(what belongs together, collective) in order: stages of a bucket have its words; a statistic of each step is
    one by itself, which is waited for at once."""
    runs, counts, waited = [], {}, set()  # type: list[tuple[str, int]], dict[str, int], set[int]
    actions = trace.threads[COMPUTING]
    for index, action in enumerate(actions):
        if action.op is Op.WAIT:
            waited.add(action.number)
        if action.op is not Op.BEGIN:
            continue
        what = trace.calls[action.number].what
        if not what.startswith("step "):
            counts[what] = counts.get(what, 0) + 1
            following = actions[index + 1] if index + 1 < len(actions) else action
            if following.op is Op.WAIT and following.number == action.number:
                what = f"{what} {counts[what]}"
        runs.append((what, action.number))
    return runs


class _Link:
    """One transfer at a time, first come, first served."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, str, list[float]]] = []
        self._ends: dict[str, float] = {}
        self._free_at, self._count = 0.0, 0

    def add(self, run: str, ready: float, stages: Sequence[float]) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (ready, self._count, run, list(stages)))

    def end_of(self, run: str) -> float:
        while run not in self._ends:
            ready, _, one, stages = heapq.heappop(self._waiting)
            self._free_at = max(self._free_at, ready) + stages[0]
            if len(stages) > 1:
                self.add(one, self._free_at, stages[1:])
            else:
                self._ends[one] = self._free_at
        return self._ends[run]
