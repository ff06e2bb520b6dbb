"""The explanation of a deadlock: the cycle of waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.streams.tables import KERNEL, Stream
from tests.streams.trace import Action, Call, Op, Trace, short

Host = tuple[int, str]
Node = tuple[str, int, str]
"""("host", rank, thread), ("calculation", rank, "") or ("stream", its number, "")."""


@dataclass(frozen=True)
class Standstill:
    """A state in which nothing can go on, of one interleaving."""

    traces: list[Trace]
    streams: list[Stream]
    at: dict[Host, int]
    """By thread: how many of its trace's actions are done."""
    queued: list[list[tuple[int, int]]]
    """By rank: what is left on the calculation stream: kernels (-1, 0), waits for (stream, place)."""
    enqueued: list[int]
    started: list[int]
    ended: list[int]
    """By communicator's stream: how many collectives."""
    needs: list[list[int]]
    """By stream and place: how many items of the calculation stream must be done, of ..."""
    passed: list[int]
    """... those that are done, by rank."""


def wait_cycle(found: Standstill) -> list[str]:
    """The cycle of waits in words; the last waits for the first."""
    hosts: list[Node] = [("host", *host) for host in found.at]
    devices: list[Node] = [("calculation", rank, "") for rank in range(len(found.traces))]
    for start in (*hosts, *devices, *(("stream", index, "") for index in range(len(found.streams)))):
        path: list[Node] = [start]
        while True:
            following = next((node for node, _ in _waits(found, path[-1])), None)
            if following is None:
                break
            if following in path:
                return [_said(found, node) for node in path[path.index(following) :]]
            path.append(following)
    return ["there is no cycle of waits: a wait is for something that never happens"]


def _said(found: Standstill, node: Node) -> str:
    return next(words for _, words in _waits(found, node))


def _waits(found: Standstill, node: Node) -> Iterator[tuple[Node, str]]:
    """Whom a node waits for, each with the whole sentence."""
    kind, number, thread = node
    if kind == "host":
        yield from _host_waits(found, number, thread)
    elif kind == "calculation":
        for stream, place in found.queued[number][:1]:
            if stream != KERNEL:
                what = _collective(found, stream, place)
                yield ("stream", stream, ""), f"rank {number}'s calculation stream waits for {what}"
    else:
        yield from _stream_waits(found, number)


def _host_waits(found: Standstill, rank: int, thread: str) -> Iterator[tuple[Node, str]]:
    action = _next(found, rank, thread)
    if action is None:
        return
    if action.op is Op.AFTER and (rank, action.what) not in found.at:
        # A thread that only waits at barriers, and is not simulated: its last barrier is what is waited for.
        before = found.traces[rank].threads[action.what][: action.number]
        action = [*(other for other in before if other.op is Op.BARRIER)][-1]._replace(where=action.where)
    who = f"rank {rank}'s thread '{thread}', in {short(action.where)},"
    if action.op is Op.AFTER:
        yield ("host", rank, action.what), f"{who} waits for thread '{action.what}'"
    elif action.op is Op.BARRIER:
        for other in _not_there(found, action.what):
            yield ("host", *other), f"{who} waits for rank {other[0]} at the barrier '{action.what}'"
    elif action.op in (Op.READ, Op.SYNC):
        if found.queued[rank]:
            yield ("calculation", rank, ""), f"{who} waits for its device ({action.what or 'an event'})"
        for index, stream in enumerate(found.streams):
            if stream.rank == rank and found.ended[index] < found.enqueued[index] and action.op is Op.SYNC:
                yield ("stream", index, ""), f"{who} waits for its device ({action.what})"


def _stream_waits(found: Standstill, index: int) -> Iterator[tuple[Node, str]]:
    stream, place = found.streams[index], found.ended[index]
    if place >= len(stream.calls):
        return
    what = _collective(found, index, place)
    if place == found.enqueued[index]:
        for host in found.at:
            if host[0] == stream.rank and _is_to_begin(found, host, stream.group):
                yield ("host", *host), f"rank {stream.rank} has not enqueued {what} yet"
    elif found.started[index] > place:
        for other, theirs in enumerate(found.streams):
            if theirs.group == stream.group and found.started[other] <= place:
                yield (
                    ("stream", other, ""),
                    f"on rank {stream.rank} {what} is running, and waits for rank {theirs.rank}",
                )
    elif found.needs[index][place] > found.passed[stream.rank]:
        yield ("calculation", stream.rank, ""), f"on rank {stream.rank} {what} stands behind the calculation stream"
    else:
        for other, theirs in enumerate(found.streams):
            if theirs.rank == stream.rank and found.started[other] > found.ended[other]:
                running = _collective(found, other, found.ended[other])
                yield ("stream", other, ""), f"on rank {stream.rank} {what} waits for {running}, which is running"


def _collective(found: Standstill, stream: int, place: int) -> str:
    of = found.streams[stream]
    call: Call = found.traces[of.rank].calls[of.calls[place]]
    return f"{short(call.what)} [group {of.group}, {place}]"


def _next(found: Standstill, rank: int, thread: str) -> Action | None:
    actions, done = found.traces[rank].threads[thread], found.at[rank, thread]
    return actions[done] if done < len(actions) else None


def _left(found: Standstill, host: Host) -> list[Action]:
    return found.traces[host[0]].threads[host[1]][found.at[host] :]


def _not_there(found: Standstill, barrier: str) -> list[Host]:
    """Threads that have this barrier before them, or hand it over to a thread that is not looked at."""
    return [host for host in found.at if any(_comes_to(found, host[0], one, barrier) for one in _left(found, host)[1:])]


def _comes_to(found: Standstill, rank: int, action: Action, barrier: str) -> bool:
    if action.op is Op.AFTER and (rank, action.what) not in found.at:
        return any(one.what == barrier for one in found.traces[rank].threads[action.what][: action.number])
    return action.op is Op.BARRIER and action.what == barrier


def _is_to_begin(found: Standstill, host: Host, group: int) -> bool:
    calls = found.traces[host[0]].calls
    return any(action.op is Op.BEGIN and calls[action.number].group == group for action in _left(found, host))
