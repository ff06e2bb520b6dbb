"""Checkpoint folders on disk: published whole or not at all, checked before they are believed.

    checkpoints/step-00000440/persistables.safetensors   tensors (and persistables.json, which has the SHA-256 of each;
                              ranks.safetensors          what differs between ranks), written by the facade
                              state.json                 everything that is not a tensor
                              complete.json              the marker, written last: what there is, and the score

A folder is written under another name, synced, marked, and renamed; to be removed, it is renamed first. A reader
ignores folders without a marker and names that begin with a dot, but for one case: a run that comes to the same step
again moves its earlier checkpoint out of the way, and until the new one is in place, that one counts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet_train.errors import CheckpointError

STATE, MARKER = "state.json", "complete.json"
FORMAT = 2
_REPLACED, _REMOVING = ".replaced-", ".removing-"
_TENSORS = ".safetensors"  # checked tensor by tensor when they are loaded, so that the first offending one is named


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def draft_of(checkpoints: Path, step: int) -> Path:
    """Where a checkpoint is written before it is published."""
    return checkpoints / f".writing-step-{step:08d}"


def _out_of_the_way(final: Path) -> Path:
    """Where an earlier checkpoint of the same step is put while the new one takes its place."""
    return final.with_name(f"{_REPLACED}{final.name}")


def begin(checkpoints: Path, step: int) -> Path:
    """A new empty draft; the remains of a killed attempt are removed."""
    draft = draft_of(checkpoints, step)
    _remove(draft)
    draft.mkdir(parents=True)
    _sync(checkpoints.parent)
    return draft


def discard(checkpoints: Path, step: int) -> None:
    """Remove the draft of that step as far as the disk lets us; the next attempt removes the rest."""
    shutil.rmtree(draft_of(checkpoints, step), ignore_errors=True)


def publish(checkpoints: Path, step: int, state: Mapping[str, Any], score: float | None = None) -> Path:
    """Complete the draft of that step with `state` and the marker, and put it in place. Returns its final path.

    What is in the draft already has been synced by who wrote it.
    """
    draft, final = draft_of(checkpoints, step), folder_of(checkpoints, step)
    (draft / STATE).write_text(json.dumps(dict(state), indent=1), encoding="utf-8")
    _sync(draft / STATE)
    files = sorted(path for path in draft.iterdir() if path.is_file())
    marker = {path.name: None if path.suffix == _TENSORS else _sha256(path) for path in files}
    known = None if score is None or math.isnan(score) else float(score)
    content = {"format": FORMAT, "score": known, "files": marker}
    (draft / MARKER).write_text(json.dumps(content, indent=1), encoding="utf-8")
    _sync(draft / MARKER)
    _sync(draft)
    if final.exists():  # os.replace refuses a folder that is not empty
        _remove(_out_of_the_way(final))
        os.replace(final, _out_of_the_way(final))
    os.replace(draft, final)
    _sync(checkpoints)
    return final


def complete(checkpoints: Path) -> list[Path]:
    """The published checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    candidates = [*checkpoints.glob(f"{_REPLACED}step-*"), *checkpoints.glob("step-*")]
    by_name = {path.name.removeprefix(_REPLACED): path for path in candidates if (path / MARKER).is_file()}
    return [by_name[name] for name in sorted(by_name)]


def score_of(folder: Path) -> float | None:
    """The score that a published checkpoint was given."""
    score: float | None = _read_json(folder / MARKER).get("score")
    return score


def best(checkpoints: Path) -> Path | None:
    """The published checkpoint with the highest score, of equal ones the newest; None when none has a score."""
    scored = {path: score for path in reversed(complete(checkpoints)) if (score := score_of(path)) is not None}
    return max(scored, key=lambda path: scored[path]) if scored else None


def prune(checkpoints: Path, keep: int, keep_best: bool = False) -> None:
    """Remove all but the newest `keep` checkpoints (and the best), and what killed runs left."""
    published = complete(checkpoints)
    kept = {*published[-keep:], *([best(checkpoints)] if keep_best else [])}
    for path in list(checkpoints.iterdir()):
        if "step-" in path.name and path not in kept:
            _remove(path)


def _remove(folder: Path) -> None:
    """Remove a folder that may be there. A removal that is interrupted must not leave what looks complete."""
    if not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    if not folder.name.startswith(_REMOVING):
        doomed = folder.with_name(_REMOVING + folder.name.lstrip("."))
        _remove(doomed)
        os.replace(folder, doomed)
        folder = doomed
    shutil.rmtree(folder)


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint whose files are as published; CheckpointError names the first that is not.

    Of the files with tensors only their presence is checked: whoever loads them checks them tensor by tensor.
    """
    marker = _read_json(folder / MARKER)
    if marker.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: format {marker.get('format')}; this version reads format {FORMAT}")
    for name, written in marker["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {_WAY_OUT}")
        if written is not None and _sha256(path) != written:
            raise CheckpointError(f"{path} was altered after it was written (SHA-256 differs); {_WAY_OUT}")
    return _read_json(folder / STATE)


_WAY_OUT = "remove this folder to resume from the checkpoint before it"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {_WAY_OUT}") from error
    return value


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
