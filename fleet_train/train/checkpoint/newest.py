"""Which run and which checkpoint is the newest of all nodes, from what each of them reports of its own disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fleet_train.convert import persistables
from fleet_train.errors import CheckpointError
from fleet_train.files import parse_json, publish, read_regular
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.storage import RECORD, TrainingProgress, TrainingRun

_MOST_RECORD_BYTES = 64 << 10

Reports = Sequence["dict[str, Any] | None"]
"""The results of ``report_of``, by rank; None for ranks that do not act for a folder."""


class HeldCheckpoint(NamedTuple):
    """A published checkpoint reported by a node. ``progress``: how far it has trained, as read by its node."""

    progress: TrainingProgress
    rank: int
    run: TrainingRun | None
    """The run that wrote the checkpoint; None if its marker cannot be read."""
    name: str


def report_of(checkpoints: Path) -> dict[str, Any]:
    """This node's checkpoints, newest first, and the last run that it knows, as JSON."""
    held = [
        [path.name, None if saved is None else saved.run.as_json(), None if saved is None else saved.progress]
        for path, saved in reversed(storage.published(checkpoints).items())
    ]
    return {"record": read_record(checkpoints).as_json(), "held": held}


def folders_apart(first_ranks: Sequence[int], seen: Sequence[Sequence[int]]) -> list[int]:
    """The first of those ranks for each folder; ``seen[rank]``: whose markers are in the folder of ``rank``."""
    apart: list[int] = []
    for rank in first_ranks:
        if not set(seen[rank]) & set(apart):
            apart.append(rank)
    return apart


def latest_run(reports: Reports) -> TrainingRun | None:
    """The run that was begun last, of all known to any node; None if no node has a checkpoint."""
    return max((run for run, _ in _known_runs(reports)), default=None)


def run_to_continue(reports: Reports, job: str) -> TrainingRun | None:
    """The latest run; ``job``: the id of a run of this launched job, which continues its own.

    Raises CheckpointError if that cannot be told: two runs have one generation, because each began where the other was
    not known, and so neither is the later one. (Runs of versions without generations have their time.)
    """
    latest = latest_run(reports)
    if latest is None or latest.generation == 0:
        return latest
    rivals = {run.id: (rank, run) for run, rank in sorted(_known_runs(reports)) if run.generation == latest.generation}
    if job in rivals:
        return rivals[job][1]
    if len(rivals) > 1:
        where = " and ".join(f"'{run}' on rank {rank}" for run, (rank, _) in sorted(rivals.items())[:2])
        raise CheckpointError(
            f"there are checkpoints of two runs, {where}, each of which began where the other was not known: which one "
            f"is the later cannot be told ({RECORD} beside the checkpoints has the time of day at which it began). "
            "Move the folder checkpoints of the run that is not to be continued away from its nodes"
        )
    return latest


def _known_runs(reports: Reports) -> list[tuple[TrainingRun, int]]:
    """The run and the rank of each checkpoint with a marker, and of each record."""
    known = []
    for rank, report in enumerate(reports):
        if report is not None:
            known += [(storage.run_from(run), rank) for _, run, _ in report["held"]]
            known += [(run, rank) for run in [storage.run_from(report["record"])] if run != TrainingRun()]
    return known


def held_of(reports: Reports, run: TrainingRun | None) -> list[HeldCheckpoint]:
    """The checkpoints of that run, and those whose marker names no run: newest first; of equal ones, the lowest rank's.
    The newest has trained most.
    """
    entries = [(rank, *entry) for rank, report in enumerate(reports) if report for entry in report["held"]]
    known: list[tuple[str, TrainingProgress]] = [
        (name, tuple(progress)) for _, name, _, progress in entries if progress is not None
    ]
    held = [
        HeldCheckpoint(
            storage.assumed_progress(name, known) if progress is None else tuple(progress),
            rank,
            None if of is None else storage.run_from(of),
            name,
        )
        for rank, name, of, progress in entries
    ]
    of_run = [each for each in held if each.run in (run, None)]
    return sorted(of_run, key=lambda each: (*(-part for part in each.progress), each.rank))


def check_whole(folder: Path) -> None:
    """Read all of a checkpoint. CheckpointError names the first file or tensor that has changed since it was
    written."""
    storage.read(folder)
    persistables.read_folder(folder)


def read_record(checkpoints: Path) -> TrainingRun:
    """The last run known to this node; ``Run()`` if it knows none."""
    try:
        return storage.run_from(parse_json(read_regular(checkpoints / RECORD, _MOST_RECORD_BYTES)))
    except (OSError, ValueError):
        return TrainingRun()


def write_record(checkpoints: Path, run: TrainingRun) -> None:
    """Write the record atomically, synced to the disk."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    publish(checkpoints / RECORD, json.dumps(run.as_json()).encode(), f".{RECORD}", synced=True)
