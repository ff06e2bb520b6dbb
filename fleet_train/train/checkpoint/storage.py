"""Checkpoint folders on disk: published atomically, verified before they are used.

    checkpoints/step-00000440/persistables.safetensors   tensors, written by the facade
                              ranks.safetensors          those that differ between ranks
                              complete.json              the marker, written last: everything that is not a tensor

A folder is written under another name, synced, marked, and renamed; to be removed, it is renamed first. A reader
ignores folders without a marker and names that begin with a dot, with one exception: a run that reaches the same step
again moves its earlier checkpoint aside, and that one counts until the new one is in place.

`checkpoints` may be a link to a folder of another disk. The link stays; only entries with the name of a checkpoint are
removed, and if such an entry is itself a link, the link and not its target.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet_train.cluster.environment import launched_job
from fleet_train.convert import persistables
from fleet_train.convert.persistables import WAY_OUT
from fleet_train.errors import CheckpointError
from fleet_train.files import sync_folder

MARKER = persistables.DESCRIPTION
_MOST_MARKER_BYTES = 256 << 20
RECORD = "run.json"
"""The file next to the checkpoints with the last run known to this node, even if it keeps no checkpoint of it."""
_MOST_GENERATIONS = 1 << 53
_WRITING, _COPYING, _REPLACED, _REMOVING = ".writing-", ".copying-", ".replaced-", ".removing-"
_PUBLISHED = re.compile(r"(?:\.replaced-)?(step-\d{8,})", re.ASCII)
_OURS = re.compile(r"(?:\.(?:removing-)?(?:(?:writing|copying|replaced)-)?)?step-\d{8,}", re.ASCII)


@dataclass(frozen=True, order=True)
class TrainingRun:
    """The run of a checkpoint, including all its resumes; a run begun later is greater.

    Clocks may be wrong or set back: runs are ordered by their generation, and only those of one generation by time.
    """

    generation: int = 0
    """The number of the run's generation: one more than that of the latest run known where it began. 0 = written by a
    version without generations."""
    began: float = 0.0
    """Unix seconds, on the clock of the rank 0 that began it. 0 = written by a version without runs."""
    id: str = ""

    @classmethod
    def new(cls, after: TrainingRun | None = None) -> TrainingRun:
        """A run that begins now, later than ``after``: the latest one that is known. It has its launched job's name."""
        generation = 1 if after is None else after.generation + 1
        return cls(generation, time.time(), launched_job(os.environ) or secrets.token_hex(8))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


TrainingProgress = tuple[int, int, int]
"""How far a checkpoint has trained: epochs, samples of the next one, steps. The first two do not depend on the number
of ranks."""


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def draft_of(checkpoints: Path, step: int) -> Path:
    """The folder in which a checkpoint is written before it is published."""
    return checkpoints / f"{_WRITING}step-{step:08d}"


def copy_of(checkpoints: Path, name: str) -> Path:
    """The folder in which a checkpoint of another node is written before it counts."""
    return checkpoints / f"{_COPYING}{name}"


def _replaced_path(final: Path) -> Path:
    """The folder in which an earlier checkpoint of the same step is kept while the new one replaces it."""
    return final.with_name(f"{_REPLACED}{final.name}")


def begin(checkpoints: Path, step: int) -> Path:
    """A new empty draft; removes the remains of a killed attempt."""
    return begin_draft(draft_of(checkpoints, step))


def begin_draft(draft: Path) -> Path:
    """Create an empty draft in the folder of the checkpoints."""
    _remove(draft)
    draft.mkdir(parents=True)
    sync_folder(draft.parent.parent)
    return draft


def discard(checkpoints: Path, step: int) -> None:
    """Remove the draft of that step as far as the disk allows; the next attempt removes the rest."""
    shutil.rmtree(draft_of(checkpoints, step), ignore_errors=True)


def publish(
    checkpoints: Path,
    step: int,
    state: Mapping[str, Any],
    score: float | None,
    run: TrainingRun,
    tensors: Mapping[str, Any],
) -> Path:
    """Complete the draft of that step with the marker, and put it in place. Returns its final path.

    ``tensors``: what was returned when they were written into the draft, synced.
    """
    draft = draft_of(checkpoints, step)
    known = None if score is None or math.isnan(score) else float(score)
    persistables.publish(draft, {**tensors, "state": dict(state), "score": known, "run": run.as_json()})
    return put_in_place(draft, folder_of(checkpoints, step))


def sync_files(folder: Path) -> None:
    """Write what the files hold to the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def put_in_place(draft: Path, final: Path) -> Path:
    """Rename a complete draft with synced files; an earlier checkpoint of that name is then removed."""
    sync_folder(draft)
    if os.path.lexists(final):  # os.replace refuses a folder that is not empty
        _remove(_replaced_path(final))
        os.replace(final, _replaced_path(final))
    os.replace(draft, final)
    sync_folder(final.parent)
    return final


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself; its tensors are checked one by one when they are loaded."""

    state: dict[str, Any]
    score: float | None
    run: TrainingRun

    @property
    def progress(self) -> TrainingProgress | None:
        """How far it has trained; None if its state does not say."""
        try:
            return (
                int(self.state.get("epoch", 0)),
                int(self.state.get("consumed_samples", 0)),
                int(self.state["step"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError):
            return None


def read(folder: Path) -> Saved:
    """A published checkpoint without its tensors; CheckpointError names the file that is missing or altered."""
    entries = persistables.read_entries(folder)
    for name in entries["files"]:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing; {WAY_OUT}")
    state, score = entries.get("state"), entries.get("score")
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / MARKER} is damaged: it has no state of a training; {WAY_OUT}")
    if score is not None and (type(score) not in (int, float) or not abs(score) < math.inf):
        raise CheckpointError(f"{folder / MARKER} is damaged: its score is not a number; {WAY_OUT}")
    return Saved(state, score, run_from(entries.get("run")))


def published(checkpoints: Path) -> dict[Path, Saved | None]:
    """The published checkpoints, the one that has trained least first; None for those that are damaged.

    This is not the order of names: a run that continues with more ranks has fewer steps per epoch, so lower numbers.
    Raises CheckpointError if the path cannot be a folder.
    """
    refuse_no_folder(checkpoints)
    if not checkpoints.is_dir():
        return {}
    by_name: dict[str, Path] = {}
    for path in sorted(checkpoints.iterdir()):  # one that was moved aside comes before the one in its place
        name = _PUBLISHED.fullmatch(path.name)
        if name is not None and (path / MARKER).is_file():
            by_name[name[1]] = path
    saved = {name: _read_or_none(path) for name, path in by_name.items()}
    trained = {name: None if each is None else each.progress for name, each in saved.items()}
    known = [(name, progress) for name, progress in trained.items() if progress is not None]
    in_order = sorted(by_name, key=lambda name: (trained[name] or assumed_progress(name, known), _step(name)))
    return {by_name[name]: saved[name] for name in in_order}


def complete(checkpoints: Path) -> list[Path]:
    """The paths of ``published``."""
    return list(published(checkpoints))


def of_latest_run(checkpoints: Path) -> list[Path]:
    """The published checkpoints that belong to the run begun last, or that are damaged. Others are there if a process
    was killed between the first checkpoint of a run and the removal of the one that it replaces."""
    runs = {path: None if saved is None else saved.run for path, saved in published(checkpoints).items()}
    latest = max((run for run in runs.values() if run is not None), default=None)
    return [path for path, run in runs.items() if run in (latest, None)]


def _step(name: str) -> int:
    """The step in the name of a published checkpoint, even while it is moved aside."""
    return int(name.rpartition("-")[2])


def assumed_progress(name: str, known: Iterable[tuple[str, TrainingProgress]]) -> TrainingProgress:
    """The position of a damaged checkpoint whose progress cannot be read: after all lower names. A copy of the same
    name on another node gives it for both.
    """
    return max((progress for other, progress in known if _step(other) <= _step(name)), default=(0, 0, 0))


def refuse_no_folder(path: Path) -> None:
    """Raise CheckpointError if something other than a folder has this name, such as a link to an unmounted disk."""
    if not os.path.lexists(path) or path.is_dir():  # in this order: another rank may be making it
        return
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, which is not a folder: nothing can be read or saved there; "
            "mount its disk, make that folder, or remove the link"
        )
    raise CheckpointError(f"{path} is not a folder; move it away, or give another folder for the run")


def remove_others(checkpoints: Path, run: TrainingRun) -> None:
    """Remove the checkpoints of other runs and the remains of killed ones; everything else stays, also the record of
    the run. CheckpointError if one cannot be removed. None of them counts from the start of the removal.
    """
    if not checkpoints.is_dir():
        return
    try:
        ours = {path: _read_or_none(path) for path in reversed(_ours(checkpoints))}
        doomed = [_marked_for_removal(path) for path, saved in ours.items() if saved is None or saved.run != run]
        sync_folder(checkpoints)
        for path in doomed:
            _remove(path)
    except OSError as error:
        raise CheckpointError(
            f"an earlier run in {checkpoints} cannot be removed: {error}; its checkpoints would count as this run's: "
            "remove them, or give another --output_dir"
        ) from None


def _read_or_none(folder: Path) -> Saved | None:
    try:
        return read(folder)
    except CheckpointError:
        return None


def name_of(folder: Path) -> str:
    """The name of a published checkpoint, even while it is moved aside for a new one of that step."""
    return folder.name.removeprefix(_REPLACED)


def run_from(entry: Any) -> TrainingRun:
    """The reverse of ``as_json``; ``Run()`` for anything else."""
    try:
        generation = entry["generation"]
        if type(generation) is not int or not 0 <= generation < _MOST_GENERATIONS:
            return TrainingRun()
        return TrainingRun(generation, float(entry["began"]), str(entry["id"]))
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        return TrainingRun()


def best(checkpoints: Path) -> Path | None:
    """The latest run's checkpoint with the highest score (of equal ones, the newest); None if none has a score."""
    scores = {path: read(path).score for path in reversed(of_latest_run(checkpoints))}
    scored = {path: score for path, score in scores.items() if score is not None}
    return max(scored, key=lambda path: scored[path]) if scored else None


def prune(checkpoints: Path, keep: int, keep_best: bool = False) -> None:
    """Remove all except the newest `keep` checkpoints (and the best), and the remains of killed runs. Those of an
    earlier run are older than all of a later one.
    """
    present = published(checkpoints)
    by_run = sorted(present, key=lambda path: saved.run if (saved := present[path]) else TrainingRun())
    kept = {*by_run[-keep:], *([best(checkpoints)] if keep_best else [])}
    keep_only(checkpoints, {path.name for path in kept if path is not None})


def keep_only(checkpoints: Path, names: Collection[str]) -> None:
    """Remove every other checkpoint, and the remains of killed runs. Does nothing without such a folder."""
    if checkpoints.is_dir():
        for path in _ours(checkpoints):
            if path.name not in names:
                _remove(path)


def set_aside(checkpoints: Path, run: TrainingRun) -> list[Path]:
    """Move the checkpoints of other runs into folders ``checkpoints/of-run-<id>``; returns these."""
    aside: dict[Path, None] = {}
    for path, saved in published(checkpoints).items():
        if saved is not None and saved.run != run:
            aside[move_aside(path, f"of-run-{_plain(saved.run.id)}")] = None
    return list(aside)


def move_aside(path: Path, why: str) -> Path:
    """Move a checkpoint into the folder ``checkpoints/<why>``, where it no longer counts. Returns that folder."""
    aside = path.parent / why  # within, because `checkpoints` may be a link to another disk
    aside.mkdir(exist_ok=True)
    target = aside / name_of(path)
    _remove(target)
    os.replace(path, target)
    sync_folder(path.parent)
    return aside


def _plain(run_id: str) -> str:
    """The text as part of a folder's name."""
    return "".join(sign for sign in run_id if sign.isalnum())[:32] or "unknown"


def _ours(checkpoints: Path) -> list[Path]:
    """Entries with one of our names; users may keep copies and notes next to them."""
    return sorted(path for path in checkpoints.iterdir() if _OURS.fullmatch(path.name))


def _remove(folder: Path) -> None:
    """Remove a folder if it exists. An interrupted removal must not leave a folder that looks complete."""
    if folder.is_dir() and not folder.is_symlink():  # a link's target must not be removed
        shutil.rmtree(_marked_for_removal(folder))
    else:
        folder.unlink(missing_ok=True)


def _marked_for_removal(folder: Path) -> Path:
    """The path under which it is removed, with a name that does not count."""
    if folder.name.startswith(_REMOVING):
        return folder
    doomed = folder.with_name(_REMOVING + folder.name.lstrip("."))
    _remove(doomed)
    os.replace(folder, doomed)
    return doomed
