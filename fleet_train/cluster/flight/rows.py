"""A rank's row in a table of what ranks do: pure, from its ring and what ``/proc`` says of its process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from statistics import mean, median
from typing import Any, NamedTuple

from fleet_train.cluster.flight.process import ProcessState
from fleet_train.cluster.flight.ring import Event, Ring
from fleet_train.cluster.flight.stands import from_json, harmless

_TOP_LONG_SECONDS = 2.0
"""How long a rank is in something before ``top`` says so, and that others wait for it: steps are shorter, or it is
worth a look."""
_TOP_SILENT_SECONDS = 3.0
"""How old a silent rank's heartbeat is: it comes four times a second, or late on a busy machine."""

UPDATES = 10
"""How many updates, the last ones, the shown times are of."""
_SLOWER = 1.1
"""How many times the other ranks' median a slow rank takes at least: less is noise."""


@dataclass(frozen=True)
class Row:
    """A rank as the table and ``--json`` show it; None: not known yet. ``job``: hexadecimal; empty before it joins."""

    job: str
    rank: int
    ranks: int
    pid: int
    step: int
    step_ms: float | None
    exposed_ms: float | None
    loader_ms: float | None
    busy_ms: float | None
    """Milliseconds of an update without waiting for buckets."""
    memory_bytes: int
    state: str
    waits: bool
    """Whether the rank has waited for other ranks for a second or longer."""
    is_slowest: bool = False
    is_waited_for: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Row:
        """Read a row that another process has sent. Raises ValueError for anything else."""
        return from_json(cls, harmless(data))


def rows_of(looked: Iterable[tuple[Ring, ProcessState]]) -> list[Row]:
    """The rows of a machine's ranks. A rank's children, and what started it, may be recorded as well: left out."""
    every = list(looked)
    joined = {process.pid: process.parent for ring, process in every if ring.has_joined}
    return marked(
        row_of(ring, process)
        for ring, process in every
        if ring.has_joined or (process.parent not in joined and process.pid not in joined.values())
    )


def row_of(ring: Ring, process: ProcessState) -> Row:
    """The row of one rank, without what only all ranks together show: see `marked`."""
    pace = None if process.has_ended else _pace(ring)
    step, exposed, loader, busy = (None if pace is None else round(ms, 3) for ms in pace or (0.0,) * 4)
    return Row(
        job=f"{ring.job:016x}" if ring.has_joined else "",
        rank=ring.rank,
        ranks=ring.world_size,
        pid=ring.pid,
        step=ring.step,
        step_ms=step,
        exposed_ms=exposed,
        loader_ms=loader,
        busy_ms=busy,
        memory_bytes=process.memory_bytes,
        state=state_of(ring, process),
        waits=_waits_for_others(ring, process),
    )


def marked(rows: Iterable[Row]) -> list[Row]:
    """The rows by job and rank, with the slowest rank and those that others wait for marked."""
    every = sorted(rows, key=lambda row: (row.job, row.rank, row.pid))
    return [row for _, job in groupby(every, key=lambda row: row.job) for row in _marked(list(job))]


def _marked(job: Sequence[Row]) -> Iterator[Row]:
    busy = sorted(row.busy_ms for row in job if row.busy_ms is not None)
    slowest = busy[-1] if len(busy) > 1 and busy[-1] > _SLOWER * median(busy[:-1]) else None
    waits, newest = [row.waits for row in job], max(row.step for row in job)
    for row in job:
        is_behind = row.step < newest if all(waits) else not row.waits
        yield replace(
            row,
            is_slowest=slowest is not None and row.busy_ms == slowest,
            is_waited_for=bool(row.job) and any(waits) and is_behind,
        )


class _Pace(NamedTuple):
    """Milliseconds per update."""

    step: float
    exposed: float
    loader: float
    busy: float


def _pace(ring: Ring) -> _Pace | None:
    """Measure the last updates, each from the begin of a `run` to that of the first one after it; None without any."""
    runs = [event for event in ring.events if event.kind == "run"]
    starts: list[Event] = []
    # An event that was being written has a step out of order, and is the first or the last one.
    for before, run, after in zip([*runs[:1], *runs], runs, [*runs[1:], *runs[-1:]], strict=False):
        if before.step <= run.step <= after.step and (not starts or run.step != starts[-1].step):
            starts.append(run)
    # The first one may follow runs that have left the ring, or is of the program that sets the initial values.
    spans = [(one.began, two.began, two.step - one.step) for one, two in pairwise(starts[1:]) if one.step < two.step]
    if not (spans := spans[-UPDATES:]):
        return None

    def spent(kind: str) -> list[float]:
        """Milliseconds of events of a kind in each span, per update."""
        took = [(each.began, 1e3 * (each.ended - each.began)) for each in ring.events if each.kind == kind]
        return [
            sum(max(ms, 0.0) for began, ms in took if since <= began < until) / updates
            for since, until, updates in spans
        ]

    steps, waits = [1e3 * (until - since) / updates for since, until, updates in spans], spent("wait")
    busy = [step - wait for step, wait in zip(steps, waits, strict=True)]
    return _Pace(median(steps), median(waits), mean(spent("loader")), median(busy))


def is_silent(ring: Ring, process: ProcessState) -> bool:
    """Whether a rank's recorder, which nothing but Python's lock and the processor keeps, writes nothing."""
    is_able = ring.heartbeat and process.letter in ("R", "S")
    return bool(is_able) and process.at - ring.heartbeat >= _TOP_SILENT_SECONDS


def state_of(ring: Ring, process: ProcessState) -> str:
    if process.has_ended:
        return "ended"
    if process.is_stopped:
        return "stopped"
    if process.letter == "D":
        return "waits for the disk"
    if is_silent(ring, process):
        what = "keeps Python's lock" if process.letter == "R" else "does not react"
        return f"{'lacks a processor' if process.lacks_processor else what} for {process.at - ring.heartbeat:.0f} s"
    if not ring.events:
        return "starting"
    what, since = "in the script", max(event.ended for event in ring.events)
    if (doing := ring.doing) is not None:
        what, since = doing.words, doing.began
    is_long = process.at - since >= _TOP_LONG_SECONDS
    return f"{what} for {process.at - since:.0f} s" if is_long else "running"


def _waits_for_others(ring: Ring, process: ProcessState) -> bool:
    doing = ring.doing
    if doing is None or not ring.waits or process.has_ended:
        return False
    return process.at - doing.began >= _TOP_LONG_SECONDS
