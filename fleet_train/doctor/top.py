"""A live table of the ranks of this machine, from their flight recorders and ``/proc``: it only reads.

`rows_of` is pure: it makes rows from rings and from what ``/proc`` says of their processes, wherever both were read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

from fleet_train import timeouts
from fleet_train.cluster.flight import Event, Ring
from fleet_train.cluster.witness import Seen, ranks_here
from fleet_train.errors import printable

UPDATES = 10
"""Of which the times are shown: the last ones."""
_FOR_OTHERS = ("barrier", "wire", "wait", "call")
_SLOWER = 1.1
"""Than the other ranks' median: less is noise."""
LEGEND = (
    f"step time, exposed (it waits for buckets): median of the last {UPDATES} updates; loader: mean of these, since it "
    "may deliver in bursts; memory: of the process on the host, without a GPU's"
)


@dataclass(frozen=True)
class Facts:
    """What ``/proc`` says of a process. ``letter``: its state as in ``ps``; empty if it has ended."""

    pid: int
    now: float
    """The clock of its ring when this was read."""
    letter: str = ""
    parent: int = 0
    memory_bytes: int = 0

    @classmethod
    def of(cls, pid: int) -> Facts:
        now = perf_counter()
        try:
            text = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except OSError:
            return cls(pid, now)
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}
        resident = fields.get("VmRSS", ["0"])[0]  # a process that is ending has none
        return cls(pid, now, fields["State"][0], int(fields["PPid"][0]), 1024 * int(resident))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        return cls(**data)

    @property
    def has_ended(self) -> bool:
        return self.letter in ("", "Z", "X")


Rank = tuple[Ring, Facts]


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
    memory_bytes: int
    state: str
    is_slowest: bool
    is_waited_for: bool


class _Pace(NamedTuple):
    """Milliseconds per update; ``busy``: without waiting for buckets."""

    step: float
    exposed: float
    loader: float
    busy: float


def _pace(ring: Ring) -> _Pace | None:
    """Of spans from the begin of a `run` to that of the first one after the next update. None while there are none."""
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
        """Of each span, per update."""
        took = [(each.began, 1e3 * (each.ended - each.began)) for each in ring.events if each.kind == kind]
        return [
            sum(max(ms, 0.0) for began, ms in took if since <= began < until) / updates
            for since, until, updates in spans
        ]

    steps, waits = [1e3 * (until - since) / updates for since, until, updates in spans], spent("wait")
    busy = [step - wait for step, wait in zip(steps, waits, strict=True)]
    return _Pace(median(steps), median(waits), mean(spent("loader")), median(busy))


def _doing(ring: Ring) -> Event | None:
    """The innermost event that has not ended."""
    return next((event for event in reversed(ring.events) if not event.ended), None)


def state_of(ring: Ring, facts: Facts) -> str:
    if facts.has_ended:
        return "ended"
    if facts.letter in ("T", "t"):
        return "stopped"
    if facts.letter == "D":
        return "waits for the disk"
    if ring.heartbeat and (silent := facts.now - ring.heartbeat) >= timeouts.TOP_SILENT_SECONDS:
        return f"{'''keeps Python's lock''' if facts.letter == 'R' else 'does not react'} for {silent:.0f} s"
    if not ring.events:
        return "starting"
    what, since = "in the script", max(event.ended for event in ring.events)
    if (doing := _doing(ring)) is not None:
        what, since = " ".join(filter(None, (doing.kind, doing.name))), doing.began
    is_long = facts.now - since >= timeouts.TOP_LONG_SECONDS
    return f"{what} for {facts.now - since:.0f} s" if is_long else "running"


def _waits_for_others(ring: Ring, facts: Facts) -> bool:
    doing = None if facts.has_ended else _doing(ring)
    if doing is None or doing.kind not in _FOR_OTHERS:
        return False
    return facts.now - doing.began >= timeouts.TOP_LONG_SECONDS


def rows_of(seen: Iterable[Rank]) -> list[Row]:
    """By job and rank. A rank's helper and its launcher may be recorded like a rank that has not joined: left out."""
    seen = sorted(seen, key=lambda each: (each[0].job, each[0].rank, each[0].pid))
    joined = [facts for ring, facts in seen if ring.has_joined]
    pids, parents = {facts.pid for facts in joined}, {facts.parent for facts in joined}
    ranks = [each for each in seen if each[0].has_joined or not (each[1].parent in pids or each[1].pid in parents)]
    return [row for _, job in groupby(ranks, key=lambda each: each[0].job) for row in _rows_of_job(list(job))]


def _rows_of_job(seen: Sequence[Rank]) -> Iterator[Row]:
    paces = [None if facts.has_ended else _pace(ring) for ring, facts in seen]
    busy = sorted(pace.busy for pace in paces if pace is not None)
    waits = [_waits_for_others(ring, facts) for ring, facts in seen]
    newest = max(ring.step for ring, _ in seen)
    for (ring, facts), pace, is_waiting in zip(seen, paces, waits, strict=True):
        is_behind = ring.step < newest if all(waits) else not is_waiting
        yield Row(
            job=f"{ring.job:016x}" if ring.has_joined else "",
            rank=ring.rank,
            ranks=ring.world_size,
            pid=ring.pid,
            step=ring.step,
            step_ms=None if pace is None else round(pace.step, 3),
            exposed_ms=None if pace is None else round(pace.exposed, 3),
            loader_ms=None if pace is None else round(pace.loader, 3),
            memory_bytes=facts.memory_bytes,
            state=state_of(ring, facts),
            is_slowest=len(busy) > 1 and pace is not None and pace.busy == busy[-1] > _SLOWER * median(busy[:-1]),
            is_waited_for=ring.has_joined and any(waits) and is_behind,
        )


class Ranks:
    """The ranks that this user may look at. One that has ended stays while others of its job run."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def rows(self) -> list[Row]:
        known = {*self._seen, os.getpid()}
        self._seen |= {each.pid: each for each in ranks_here(lambda pid: pid not in known)}
        looked = {pid: (each.ring(), Facts.of(pid)) for pid, each in self._seen.items()}
        living = {ring.job for ring, facts in looked.values() if ring.has_joined and not facts.has_ended}
        for pid, (ring, facts) in looked.items():
            if facts.has_ended and ring.job not in living:
                self._seen.pop(pid).close()
        return rows_of(looked[pid] for pid in self._seen)


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """A heading and a table for each job."""
    for job, group in groupby(rows, key=lambda row: row.job):
        ranks = list(group)
        yield f"job {job}: {len(ranks)} of {ranks[0].ranks} ranks are here" if job else "have not joined a job yet:"
        yield _line("rank", "step", "step time", "exposed", "loader", "memory", "state")
        for row in ranks:
            times = (f"{ms:.1f} ms" if ms is not None else "-" for ms in (row.step_ms, row.exposed_ms, row.loader_ms))
            state = "; ".join([row.state, *["slowest"] * row.is_slowest, *["others wait for it"] * row.is_waited_for])
            yield _line(str(row.rank), str(row.step), *times, f"{row.memory_bytes / 1e6:,.0f} MB", printable(state))
        yield ""
    yield LEGEND


def _line(rank: str, step: str, *cells: str) -> str:
    *numbers, state = cells
    return f"{rank:>6} {step:>9} {' '.join(f'{cell:>12}' for cell in numbers)}  {state}"
