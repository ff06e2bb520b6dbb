"""A rank's trace: actions of its host threads, in order, and the collectives that they enqueue; and why all stands
still, as a cycle of waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

COMPUTING = "computing"
"""The host thread that the program runs on."""


class Op(IntEnum):
    """What a host thread does. Kernels, waits and events go to the calculation stream; none of these blocks the host
    but the last five."""

    KERNEL = 0
    """Enqueue ``amount`` operators of the program."""
    BEGIN = 1
    """Enqueue collective ``number`` on its group's stream, behind what the calculation stream holds now."""
    WAIT = 2
    """Let the calculation stream wait for collective ``number``."""
    RECORD = 3
    """Enqueue event ``number`` (a copy to the host) on the calculation stream."""
    READ = 4
    """Wait for event ``number``."""
    SYNC = 5
    """Wait for all that is enqueued on this device."""
    BARRIER = 6
    """Wait for all ranks at barrier ``what``."""
    AFTER = 7
    """Wait until thread ``what`` has done ``number`` actions."""


class Action(NamedTuple):
    op: Op
    number: int = -1
    what: str = ""
    amount: int = 0
    where: str = ""
    """The host operator, or the call, that this belongs to."""


@dataclass(frozen=True)
class Call:
    """A collective that a rank takes part in. ``signature``: what must be equal on all ranks of the group."""

    group: int
    ranks: tuple[int, ...]
    signature: str
    nbytes: int
    what: str
    """In words: the bucket."""


@dataclass
class Trace:
    """Of one rank."""

    rank: int
    threads: dict[str, list[Action]] = field(default_factory=lambda: {COMPUTING: []})
    calls: list[Call] = field(default_factory=list)
    first_step: dict[str, int] = field(default_factory=dict)
    """By thread: how many actions come before the first step."""

    def of_group(self, group: int) -> list[int]:
        """The collectives of a group, by number, in the order in which they are enqueued."""
        begun = [action.number for actions in self.threads.values() for action in actions if action.op is Op.BEGIN]
        return [number for number in begun if self.calls[number].group == group]

    @property
    def groups(self) -> list[int]:
        return sorted({call.group for call in self.calls})


class Stream(NamedTuple):
    """Of one communicator, on one rank."""

    rank: int
    group: int
    calls: tuple[int, ...]
    """Numbers of the rank's collectives, in order."""


def streams_of(traces: Sequence[Trace]) -> list[Stream]:
    """All communicators' streams, rank by rank."""
    return [Stream(trace.rank, group, tuple(trace.of_group(group))) for trace in traces for group in trace.groups]


def short(what: str) -> str:
    """A bucket in words without its gradients."""
    return what.partition(" (")[0]


def mismatches(traces: Sequence[Trace]) -> list[str]:
    """In words: sequence numbers of a group at which its ranks call different collectives, and barriers that not all
    ranks come to. NCCL would exchange wrong values or wait for ever."""
    found = []
    for group in sorted({group for trace in traces for group in trace.groups}):
        members = {call.ranks for trace in traces for call in trace.calls if call.group == group}
        if len(members) > 1:
            found.append(f"group {group} has different ranks: {sorted(members)}")
            continue
        found += _differences_in(group, [traces[rank] for rank in members.pop()])
    return found + _missed_barriers(traces)


def _differences_in(group: int, traces: Sequence[Trace]) -> list[str]:
    orders = [[trace.calls[number] for number in trace.of_group(group)] for trace in traces]
    first = orders[0]
    for trace, order in zip(traces[1:], orders[1:], strict=True):
        for place, (ours, theirs) in enumerate(zip(first, order, strict=False)):
            if ours.signature != theirs.signature:
                first_said, said = (f"{call.signature} ({short(call.what)})" for call in (ours, theirs))
                ranks = traces[0].rank, trace.rank
                return [
                    f"collective {place} of group {group}: rank {ranks[0]} calls {first_said}, rank {ranks[1]} {said}"
                ]
        if len(order) != len(first):
            return [
                f"group {group}: rank {traces[0].rank} calls {len(first)} collectives, rank {trace.rank} {len(order)}"
            ]
    return []


def _missed_barriers(traces: Sequence[Trace]) -> list[str]:
    barriers = [
        {action.what for actions in trace.threads.values() for action in actions if action.op is Op.BARRIER}
        for trace in traces
    ]
    return [
        f"not all ranks reach the barrier '{one}'"
        for one in sorted(set.union(*barriers))
        if not all(one in m for m in barriers)
    ]


def from_first_step(trace: Trace) -> Trace:
    """Without conversion and start values, behind which all streams are empty."""
    start = trace.first_step
    kept = {name: actions[start.get(name, 0) :] for name, actions in trace.threads.items()}
    for name, actions in kept.items():
        moved = [a._replace(number=a.number - start.get(a.what, 0)) if a.op is Op.AFTER else a for a in actions]
        kept[name] = [action for action in moved if action.op is not Op.AFTER or action.number > 0]
        if len(kept[name]) < len(actions):
            raise AssertionError(f"thread {name} waits in a step for what was done before the first one")
    return Trace(trace.rank, kept, trace.calls)


KERNEL = -1
Node = tuple[str, int]
"""("host", rank), ("calculation", rank) or ("stream", its number)."""


@dataclass(frozen=True)
class Standstill:
    """A state in which nothing can go on, of one interleaving."""

    traces: list[Trace]
    streams: list[Stream]
    at: list[int]
    """By rank: how many actions its computing thread has done."""
    queued: list[list[tuple[int, int]]]
    """By rank: what is left on the calculation stream: operators (KERNEL, 0), waits for (stream, place)."""
    enqueued: list[int]
    started: list[int]
    ended: list[int]
    """By communicator's stream: how many collectives."""
    needs: list[list[int]]
    """By stream and place: how many items of the calculation stream must be done, of ..."""
    passed: list[int]
    """... those that are done, by rank."""

    def left(self, rank: int) -> list[Action]:
        """What the rank's computing thread has before it."""
        return self.traces[rank].threads[COMPUTING][self.at[rank] :]


def wait_cycle(found: Standstill) -> list[str]:
    """The cycle of waits in words; the last waits for the first."""
    counts = {"host": len(found.at), "calculation": len(found.traces), "stream": len(found.streams)}
    for start in [(kind, number) for kind, count in counts.items() for number in range(count)]:
        path: list[Node] = [start]
        while following := next((node for node, _ in _waits(found, path[-1])), None):
            if following in path:
                return [next(words for _, words in _waits(found, node)) for node in path[path.index(following) :]]
            path.append(following)
    return ["there is no cycle of waits: a wait is for something that never happens"]


def _waits(found: Standstill, node: Node) -> Iterator[tuple[Node, str]]:
    """Whom a node waits for, each with the whole sentence."""
    kind, number = node
    if kind == "host":
        yield from _host_waits(found, number)
    elif kind == "stream":
        yield from _stream_waits(found, number)
    else:
        for stream, place in found.queued[number][:1]:
            if stream != KERNEL:
                what = _collective(found, stream, place)
                yield ("stream", stream), f"rank {number}'s calculation stream waits for {what}"


def _host_waits(found: Standstill, rank: int) -> Iterator[tuple[Node, str]]:
    left = found.left(rank)
    if not left:
        return
    action = left[0]
    if action.op is Op.AFTER:
        # Other threads only wait at barriers, and are not simulated: their last barrier is what is waited for.
        before = found.traces[rank].threads[action.what][: action.number]
        action = [one for one in before if one.op is Op.BARRIER][-1]._replace(where=action.where)
    who = f"rank {rank}'s thread '{COMPUTING}', in {short(action.where)},"
    if action.op is Op.BARRIER:
        for other in range(len(found.at)):
            if any(_comes_to(found, other, one, action.what) for one in found.left(other)[1:]):
                yield ("host", other), f"{who} waits for rank {other} at the barrier '{action.what}'"
    elif action.op in (Op.READ, Op.SYNC):
        if found.queued[rank]:
            yield ("calculation", rank), f"{who} waits for its device ({action.what or 'an event'})"
        for index, stream in enumerate(found.streams):
            if stream.rank == rank and found.ended[index] < found.enqueued[index] and action.op is Op.SYNC:
                yield ("stream", index), f"{who} waits for its device ({action.what})"


def _comes_to(found: Standstill, rank: int, action: Action, barrier: str) -> bool:
    """Whether this is the barrier, or the wait for a thread that it is handed over to."""
    if action.op is Op.AFTER:
        return any(one.what == barrier for one in found.traces[rank].threads[action.what][: action.number])
    return action.op is Op.BARRIER and action.what == barrier


def _stream_waits(found: Standstill, index: int) -> Iterator[tuple[Node, str]]:
    stream, place = found.streams[index], found.ended[index]
    if place >= len(stream.calls):
        return
    rank, what = stream.rank, _collective(found, index, place)
    if place == found.enqueued[index]:
        yield ("host", rank), f"rank {rank} has not enqueued {what} yet"
    elif found.started[index] > place:
        for other, theirs in enumerate(found.streams):
            if theirs.group == stream.group and found.started[other] <= place:
                yield ("stream", other), f"on rank {rank} {what} is running, and waits for rank {theirs.rank}"
    elif found.needs[index][place] > found.passed[rank]:
        yield ("calculation", rank), f"on rank {rank} {what} stands behind the calculation stream"
    else:
        for other, theirs in enumerate(found.streams):
            if theirs.rank == rank and found.started[other] > found.ended[other]:
                running = _collective(found, other, found.ended[other])
                yield ("stream", other), f"on rank {rank} {what} waits for {running}, which is running"


def _collective(found: Standstill, stream: int, place: int) -> str:
    of = found.streams[stream]
    call = found.traces[of.rank].calls[of.calls[place]]
    return f"{short(call.what)} [group {of.group}, {place}]"
