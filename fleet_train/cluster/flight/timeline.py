"""The timeline of a job: the rings of its ranks on one clock, each rank's steps cut into pieces, and all as a trace.

Pure. Times are seconds of the job's clock. A *step* of a rank reaches from the end of the run of the program that ended
the step before to the end of its own. Its *pieces* follow one another without a gap: what its program was doing, or
the script between two runs. Beside them are the *events* of communicators' threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet_train.cluster.flight.ring import Event, Ring

BOTH_PASSES = "forward and backward"
"""The piece of a program that was converted without a mark where the backward pass begins."""
SCRIPT = "script"
"""The piece between two runs in which nothing was recorded."""
OTHER_RUN = "run"
"""The piece of a run of a program that communicates nothing."""
_COMMUNICATION = ("wire", "code", "barrier")
_BESIDE_RUNS = ("loader", "save", "evaluate", "call")


@dataclass(frozen=True)
class Span:
    """A piece of a step, or an event."""

    kind: str
    name: str
    began: float
    ended: float
    group: str = ""
    nbytes: int = 0
    thread: int = 0
    is_unfinished: bool = False
    """Whether the span had not ended; ``ended`` is then the end of the rank's recording."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def words(self) -> str:
        return f"{self.kind} {self.name}".strip()


@dataclass(frozen=True)
class TimelineStep:
    """One step of one rank; times in seconds."""

    number: int
    began: float
    ended: float
    pieces: tuple[Span, ...]
    events: tuple[Span, ...]
    """Events that began in the step on communicators' threads."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def waited(self) -> float:
        """Seconds in which the rank's program waited for other ranks."""
        return sum(piece.seconds for piece in self.pieces if piece.kind == "wait")


@dataclass(frozen=True)
class RankTimeline:
    """One rank: ``clock_offset`` is its machine's clock minus the job's, ``clock_error`` how wrong that may be."""

    rank: int
    endpoint: str
    clock_offset: float
    clock_error: float
    events: tuple[Span, ...]
    steps: dict[int, TimelineStep]
    """The rank's steps that have ended and whose beginning is known, by number."""

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f" ({self.endpoint})" if self.endpoint else "")


def timelines(rings: Iterable[Ring]) -> list[RankTimeline]:
    """The timelines of all ranks, by rank. Ranks of one host have one clock: the measurement with the least error is
    that of all of them."""
    chosen: dict[str, Ring] = {}
    rings = sorted(rings, key=lambda ring: ring.rank)
    for ring in sorted(rings, key=lambda ring: ring.clock_error):
        chosen.setdefault(_host(ring), ring)
    return [_timeline(ring, chosen[_host(ring)]) for ring in rings]


def _host(ring: Ring) -> str:
    return ring.endpoint.rpartition(":")[0] or f"rank {ring.rank}"


def _timeline(ring: Ring, clock: Ring) -> RankTimeline:
    last = max((max(event.began, event.ended) for event in ring.events), default=0.0)
    spans = [(event, _span(event, clock.clock_offset, last)) for event in ring.events]
    events = tuple(sorted((span for _, span in spans), key=lambda span: (span.began, -span.ended)))
    steps = {number: step for number, step in _steps(events, _ends(spans)).items() if number >= ring.traced[0]}
    return RankTimeline(ring.rank, ring.endpoint, clock.clock_offset, clock.clock_error, events, steps)


def _span(event: Event, offset: float, last: float) -> Span:
    is_open = not event.ended
    ended = last if is_open else event.ended
    return Span(
        event.kind, event.name, event.began - offset, ended - offset, event.group, event.nbytes, event.thread, is_open
    )


def _ends(spans: Sequence[tuple[Event, Span]]) -> dict[int, Span]:
    """The run that ended each step: the one in which the rank waited for that step's buckets. (In a micro-batch without
    an update it waits for nothing, by no name.)"""
    runs = [span for event, span in spans if event.kind == "run" and not span.is_unfinished]
    ends: dict[int, Span] = {}
    for event, span in spans:
        run = next((run for run in runs if run.began <= span.began <= run.ended), None)
        if event.kind == "wait" and event.name and run is not None:
            ends[event.step] = run
    return ends


def _steps(events: Sequence[Span], ends: dict[int, Span]) -> dict[int, TimelineStep]:
    steps = {}
    for number, run in ends.items():
        before = ends.get(number - 1)
        if before is None and number > 1:
            continue
        began = run.began if before is None else before.ended
        within = [event for event in events if began <= event.began < run.ended]
        beside = tuple(event for event in within if event.kind in _COMMUNICATION)
        steps[number] = TimelineStep(number, began, run.ended, tuple(_pieces(within, began, run.ended)), beside)
    return steps


def _pieces(within: Sequence[Span], began: float, ended: float) -> list[Span]:
    """The pieces of a step without gaps; of what is inside something else, only a run's own parts count."""
    pieces: list[Span] = []
    at = began
    for span in within:
        if span.kind not in ("run", *_BESIDE_RUNS) or span.began < at:
            continue
        if span.began > at:
            pieces.append(Span(SCRIPT, "", at, span.began))
        pieces += _of_run(span, within) if span.kind == "run" else [span]
        at = span.ended
    if at < ended:
        pieces.append(Span(SCRIPT, "", at, ended))
    return pieces


def _of_run(run: Span, within: Sequence[Span]) -> list[Span]:
    """The parts of a run: forward and backward pass, in which buckets are copied; then waits and updates in turn."""
    inside = [event for event in within if run.began <= event.began and event.ended <= run.ended]
    waits = [event for event in inside if event.kind == "wait"]
    if not waits:
        return [replace(run, kind=OTHER_RUN)]
    first = waits[0].began
    mark = next((event.began for event in inside if event.kind == "backward"), None)
    copies = [event for event in inside if event.kind == "copy" and event.ended <= first]
    if mark is None:
        passes = _filled(BOTH_PASSES, run.began, first, copies)
    else:
        passes = [Span("forward", "", run.began, mark)]
        passes += _filled("backward", mark, first, [each for each in copies if each.began >= mark])
    return passes + _filled("update", first, run.ended, waits)


def _filled(kind: str, began: float, ended: float, spans: Iterable[Span]) -> list[Span]:
    """``spans`` that follow one another, and pieces of this kind around them."""
    pieces, at = [], began
    for span in spans:
        if span.began > at:
            pieces.append(Span(kind, "", at, span.began))
        if span.began >= at:
            pieces.append(span)
            at = span.ended
    return [*pieces, Span(kind, "", at, ended)] if at < ended else pieces


def tracks(rank: RankTimeline) -> dict[str, list[Span]]:
    """What is drawn of a rank, by the track's name; on one track nothing overlaps anything."""
    named: dict[str, list[Span]] = {"program": [], "copies and waits": []}
    for step in rank.steps.values():
        named["program"] += [piece for piece in step.pieces if piece.kind not in _BESIDE_RUNS]
    covered = [(step.began, step.ended) for step in rank.steps.values()]
    numbers: dict[int, int] = {}
    for event in rank.events:
        if event.kind in _COMMUNICATION:
            number = numbers.setdefault(event.thread, len(numbers))
            named.setdefault(f"communicator {number}", []).append(event)
        elif event.kind in _BESIDE_RUNS:
            named.setdefault(event.kind, []).append(event)
        elif event.kind in ("copy", "wait"):
            named["copies and waits"].append(event)
        elif event.kind == "run" and not any(began <= event.began < ended for began, ended in covered):
            named["program"].append(event)
    return {name: spans for track, found in named.items() for name, spans in _lanes(track, found)}


def _lanes(track: str, spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """Spans that overlap go to further tracks of the same name."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.began, -span.ended)):
        free = next((lane for lane in lanes if lane[-1].ended <= span.began), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return [(track if number == 0 else f"{track} ({number + 1})", lane) for number, lane in enumerate(lanes)]


def chrome_trace(ranks: Sequence[RankTimeline]) -> dict[str, Any]:
    """All ranks in the trace format of Chrome, which Perfetto opens: a process for each rank, a thread for each track.

    Times are microseconds since the first event.
    """
    start = min((event.began for rank in ranks for event in rank.events), default=0.0)
    written: list[dict[str, Any]] = []
    for rank in ranks:
        written.append(_metadata(rank.rank, 0, "process_name", name=rank.name))
        written.append(_metadata(rank.rank, 0, "process_sort_index", sort_index=rank.rank))
        for thread, (name, spans) in enumerate(tracks(rank).items(), 1):
            written.append(_metadata(rank.rank, thread, "thread_name", name=name))
            written.append(_metadata(rank.rank, thread, "thread_sort_index", sort_index=thread))
            written += [_complete(rank.rank, thread, span, start) for span in spans]
    clocks = [
        {"rank": rank.rank, "offset_seconds": rank.clock_offset, "error_seconds": rank.clock_error} for rank in ranks
    ]
    return {"traceEvents": written, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def _metadata(rank: int, thread: int, what: str, **arguments: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _complete(rank: int, thread: int, span: Span, start: float) -> dict[str, Any]:
    began, ended = (round(1e6 * (at - start), 3) for at in (span.began, span.ended))
    told = {"group": span.group, "bytes": span.nbytes, "unfinished": span.is_unfinished}
    return {
        "name": span.words,
        "cat": span.kind,
        "ph": "X",
        "ts": began,
        "dur": round(ended - began, 3),
        "pid": rank,
        "tid": thread,
        "args": {name: value for name, value in told.items() if value},
    }


def common_steps(ranks: Sequence[RankTimeline]) -> list[int]:
    """The steps that every one of these ranks has."""
    found = [set(rank.steps) for rank in ranks]
    return sorted(set.intersection(*found)) if found else []


def typical_step(ranks: Sequence[RankTimeline], steps: Sequence[int]) -> int:
    """The step of median length."""
    by_length = sorted(steps, key=lambda number: max(rank.steps[number].seconds for rank in ranks))
    return by_length[len(by_length) // 2]
