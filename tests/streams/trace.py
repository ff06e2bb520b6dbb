"""A rank's trace: actions of its host threads, in order, and the collectives that they enqueue."""

from __future__ import annotations

from collections.abc import Sequence
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


def without_kernels(trace: Trace) -> Trace:
    """The same without the program's operators.

    They only delay what stands behind them, and a replay delays everything at random: what can stand still with them
    can without them, and the other way round.
    """
    kept: dict[str, list[Action]] = {}
    done_before: dict[str, list[int]] = {}
    for name, actions in trace.threads.items():
        kept[name] = [action for action in actions if action.op is not Op.KERNEL]
        counts = [0]
        for action in actions:
            counts.append(counts[-1] + (action.op is not Op.KERNEL))
        done_before[name] = counts
    for actions in kept.values():
        for index, action in enumerate(actions):
            if action.op is Op.AFTER:
                actions[index] = action._replace(number=done_before[action.what][action.number])
    return Trace(trace.rank, kept, trace.calls)
