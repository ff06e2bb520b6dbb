"""Why a step was not shorter: each moment of it, on the rank that others wait for, and what it was spent on.

Pure. In each step one rank is followed, the one that waits least: its pieces add up to the step. A piece in which it
computes counts for all ranks as far as the others (their median) take as long, and beyond that for this rank alone. A
wait counts for what it waits for at each moment: a rank that has not come to the same collective or barrier yet, or
that collective on the wire, or the packing of a bucket.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Any

from fleet_train.cluster.flight.timeline import BOTH_PASSES, OTHER_RUN, SCRIPT, RankTimeline, Span, TimelineStep

LATE, NOTHING = "late", "nothing"
Arrivals = dict[Span, tuple[int, float]]
_PHRASES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    BOTH_PASSES: "the forward and backward pass",
    "copy": "the copy of the gradients of",
    "update": "the update",
    SCRIPT: "the script between its steps",
    OTHER_RUN: "other programs",
    "loader": "the loader, for its next batch",
    "evaluate": "the evaluation",
    "save": "the save,",
    "call": "the call",
}


@dataclass(frozen=True)
class SlowStepCause:
    """What time is attributed to. ``rank``: that alone spent it; -1 for all."""

    kind: str
    name: str = ""
    rank: int = -1


@dataclass(frozen=True)
class Reason:
    """Means over the steps; ``share`` of the step. ``total_ms``: of a bucket's wire, with what computing has hidden."""

    cause: SlowStepCause
    ms: float
    share: float
    total_ms: float

    @property
    def text(self) -> str:
        cause, time = self.cause, f"{self.ms:.1f} ms ({100 * self.share:.0f} %)"
        match cause.kind:
            case "wire":
                what = cause.name or "a collective of the program"
                return f"{time}: {what} on the wire, exposed, of {self.total_ms:.1f} ms in all"
            case "code":
                return f"{time}: packing and unpacking {cause.name}, on a communicator's thread"
            case "barrier":
                return f"{time}: the barrier of the step, after the last rank had come to it"
            case "nothing":
                return f"{time}: {cause.name} waited, and no communicator's thread had begun anything"
            case "late":
                return f"{time}: rank {cause.rank} was later than the others at {cause.name}: they waited for it"
        doing = f"{_PHRASES.get(cause.kind, cause.kind)} {cause.name}".strip()
        if cause.rank < 0:
            return f"{time}: {doing}, on every rank"
        return f"{time}: rank {cause.rank} was longer in {doing} than the others (median): they waited for it"

    def as_json(self) -> dict[str, Any]:
        cause = self.cause
        rank = None if cause.rank < 0 else cause.rank
        told = {"kind": cause.kind, "name": cause.name, "rank": rank, "ms": round(self.ms, 3)}
        return {**told, "share": round(self.share, 4), "text": self.text}


def reasons(ranks: Sequence[RankTimeline], steps: Sequence[int]) -> tuple[float, list[Reason]]:
    """The mean length of these steps in milliseconds, and on what it was spent, most of it first; the parts add up."""
    spent: defaultdict[SlowStepCause, float] = defaultdict(float)
    sent: defaultdict[str, float] = defaultdict(float)
    for number in steps:
        of_ranks = {rank.rank: rank.steps[number] for rank in ranks}
        followed = min(of_ranks, key=lambda rank: of_ranks[rank].waited)
        arrivals = _last_arrivals(followed, of_ranks)
        for cause, seconds in chain(_computed(followed, of_ranks), _awaited(followed, of_ranks[followed], arrivals)):
            spent[cause] += seconds
        for event, (_, arrived) in arrivals.items():
            if event.kind == "wire":
                sent[event.name] += event.ended - min(event.ended, max(arrived, event.began))
    whole, milliseconds = sum(spent.values()), 1e3 / max(1, len(steps))
    found = [
        Reason(cause, milliseconds * seconds, seconds / whole, milliseconds * sent[cause.name])
        for cause, seconds in sorted(spent.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    return milliseconds * whole, found


def _computed(followed: int, steps: dict[int, TimelineStep]) -> Iterator[tuple[SlowStepCause, float]]:
    """What the followed rank did itself, as long as the others and beyond that."""
    others = [_sums(step) for rank, step in steps.items() if rank != followed]
    for what, seconds in _sums(steps[followed]).items():
        usual = min(seconds, median(sums[what] for sums in others)) if others else seconds
        yield SlowStepCause(*what), usual
        yield SlowStepCause(*what, followed), seconds - usual


def _sums(step: TimelineStep) -> dict[tuple[str, str], float]:
    """Seconds of a step's pieces, without waits."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for piece in step.pieces:
        if piece.kind != "wait":
            sums[piece.kind, piece.name] += piece.seconds
    return sums


def _last_arrivals(followed: int, steps: dict[int, TimelineStep]) -> Arrivals:
    """The rank that began each collective, barrier and packing of the followed rank last, and when."""
    by_key: defaultdict[tuple[tuple[str, str, str], int], dict[int, Span]] = defaultdict(dict)
    for rank, step in steps.items():
        seen: Counter[tuple[str, str, str]] = Counter()
        for event in step.events:
            key = event.kind, event.name, event.group
            by_key[key, seen[key]][rank] = event
            seen[key] += 1
    arrivals = {}
    for events in by_key.values():
        if followed in events:
            last = max(events, key=lambda rank: events[rank].began)
            arrivals[events[followed]] = last, events[last].began
    return arrivals


def _awaited(followed: int, step: TimelineStep, arrivals: Arrivals) -> Iterator[tuple[SlowStepCause, float]]:
    """What the waits of the followed rank were for, moment by moment."""
    for wait in (piece for piece in step.pieces if piece.kind == "wait"):
        events = [event for event in step.events if event.began < wait.ended and event.ended > wait.began]
        moments = {wait.began, wait.ended}
        for event in events:
            moments |= {event.began, event.ended, arrivals[event][1]}
        inside = sorted(moment for moment in moments if wait.began <= moment <= wait.ended)
        for since, until in pairwise(inside):
            under_way = [event for event in events if event.began <= since and event.ended >= until]
            yield _cause(wait, followed, under_way, arrivals, since), until - since


_ORDER = {"barrier": 1, "wire": 2, "code": 3}


def _cause(wait: Span, followed: int, under_way: Sequence[Span], arrivals: Arrivals, at: float) -> SlowStepCause:
    """The cause of a wait: the bucket's own event, else the barrier, which all buckets wait for, else another bucket's,
    which is before it on the thread."""
    chosen = min(under_way, key=lambda event: 0 if event.name == wait.name else _ORDER[event.kind], default=None)
    if chosen is None:
        return SlowStepCause(NOTHING, wait.name)
    last, arrived = arrivals[chosen]
    if chosen.kind in ("wire", "barrier") and last != followed and at < arrived:
        return SlowStepCause(LATE, chosen.name or "the barrier", last)
    return SlowStepCause(chosen.kind, chosen.name)
