"""Which run and which checkpoint is the newest of all nodes, and which nodes have their own folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_train.convert.state import persistables
from fleet_train.errors import CheckpointError
from fleet_train.files import parse_json, publish, read_regular
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.storage import RECORD, Place, Run

_MOST_RECORD_BYTES = 64 << 10

Told = Sequence["dict[str, Any] | None"]
"""The results of ``tell``, by rank; None for ranks that do not act for a folder."""


@dataclass(frozen=True)
class Held:
    """A published checkpoint reported by a node. ``place``: how far it has trained, as read by its node."""

    place: Place
    rank: int
    run: Run | None
    """None if its marker cannot be read."""
    name: str


def tell(checkpoints: Path) -> dict[str, Any]:
    """This node's checkpoints, newest first."""
    found = []
    for path in reversed(storage.complete(checkpoints)):
        try:
            run = storage.run_of(path).as_json()
        except CheckpointError:
            run = None
        found.append([path.name, run, storage.place_of(path)])
    return {"record": read_record(checkpoints).as_json(), "held": found}


def folders_apart(first_ranks: Sequence[int], seen: Sequence[Sequence[int]]) -> list[int]:
    """The first of those ranks for each folder; ``seen[rank]``: whose markers are in the folder of ``rank``."""
    apart: list[int] = []
    for rank in first_ranks:
        if not set(seen[rank]) & set(apart):
            apart.append(rank)
    return apart


def latest_run(told: Told) -> Run | None:
    """The run that was begun last, of all known to any node; None if no node has a checkpoint."""
    return max((run for _, run in _known_runs(told)), default=None)


def run_to_continue(told: Told, job: str) -> Run | None:
    """The latest run; ``job``: the id of a run of this launched job, which continues its own.

    Raises CheckpointError if that cannot be told: two runs have one generation, because each began where the other was
    not known, and so neither is the later one. (Runs of versions without generations have their time.)
    """
    latest = latest_run(told)
    if latest is None or latest.generation == 0:
        return latest
    known = sorted(_known_runs(told), key=lambda one: one[1])
    rivals = {run.id: (rank, run) for rank, run in known if run.generation == latest.generation}
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


def _known_runs(told: Told) -> list[tuple[int, Run]]:
    """(rank, run) of each checkpoint with a marker, and of each record."""
    found = []
    for rank, each in enumerate(told):
        if each is not None:
            found += [(rank, storage.run_from(run)) for _, run, _ in each["held"]]
            found += [(rank, run) for run in [storage.run_from(each["record"])] if run != Run()]
    return found


def held_of(told: Told, run: Run | None) -> list[Held]:
    """The checkpoints of that run, and those whose marker names no run: newest first; of equal ones, the lowest rank's.
    The newest has trained most.
    """
    entries = [(rank, *entry) for rank, each in enumerate(told) if each is not None for entry in each["held"]]
    known: list[tuple[str, Place]] = [(name, tuple(place)) for _, name, _, place in entries if place is not None]
    held = [
        Held(
            storage.behind(name, known) if place is None else tuple(place),
            rank,
            None if of is None else storage.run_from(of),
            name,
        )
        for rank, name, of, place in entries
    ]
    return sorted(
        (one for one in held if one.run in (run, None)), key=lambda one: (*(-part for part in one.place), one.rank)
    )


def check_whole(folder: Path) -> None:
    """Read all of a checkpoint. CheckpointError names the first file or tensor that has changed since it was
    written."""
    storage.read_state(folder)
    if (folder / persistables.DESCRIPTION).is_file():
        persistables.read_folder(folder)


def read_record(checkpoints: Path) -> Run:
    """The last run known to this node; ``Run()`` if it knows none."""
    try:
        return storage.run_from(parse_json(read_regular(checkpoints / RECORD, _MOST_RECORD_BYTES)))
    except (OSError, ValueError):
        return Run()


def write_record(checkpoints: Path, run: Run) -> None:
    """Write it atomically, synced to the disk."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    publish(checkpoints / RECORD, json.dumps(run.as_json()).encode(), f".{RECORD}", synced=True)


def words_for(number: int, nodes: int, own: Sequence[str]) -> str:
    """Which nodes keep checkpoints, if ``number`` are requested: ``nodes`` could, ``own`` have their own folder."""
    if len(own) >= number:
        return f"checkpoints are kept on {', '.join(own[:number])}"
    if len(own) > 1:
        return f"checkpoints are kept on {', '.join(own)}, as many as there are"
    if nodes > 1:
        return "all nodes see rank 0's checkpoints in one shared folder; nothing is sent"
    return f"there is no second node to keep them; checkpoints are kept on {own[0]} alone"
