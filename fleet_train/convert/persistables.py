"""A program's persistable state on disk: safetensors for the tensors, JSON beside it. No pickle, ever."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as dump_tensors

import fleet_train
from fleet_train.collectives.paddle_check import installed_version
from fleet_train.errors import CheckpointError

TENSORS = "persistables.safetensors"
DESCRIPTION = "persistables.json"
FORMAT = 1
POSITION_PREFIX = "fleet_train/"
"""Names of what is saved beside the program's own tensors; a program that does not need it ignores it."""

Arrays = dict[str, np.ndarray[Any, Any]]


def read_scope(program: Any, scope: Any) -> tuple[Arrays, dict[str, str]]:
    """All persistable values of ``program`` and their dtypes' names; bfloat16 as its bits in uint16."""
    arrays: Arrays = {}
    dtypes: dict[str, str] = {}
    for name, tensor in program.state_dict("all", scope).items():
        arrays[name] = np.ascontiguousarray(np.asarray(tensor))
        dtypes[name] = (
            str(tensor._dtype() if hasattr(tensor, "_dtype") else arrays[name].dtype).rsplit(".", 1)[-1].lower()
        )
    if not arrays:
        raise CheckpointError("the program has no persistable values in this scope: run the startup program first")
    return arrays, dtypes


def write_folder(folder: Path, arrays: Arrays, dtypes: dict[str, str]) -> None:
    """Write state so that a crash leaves the old files or the new ones: beside, fsynced, renamed, description last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dump_tensors(arrays)
    description = {
        "format": FORMAT,
        "sha256": hashlib.sha256(tensors).hexdigest(),
        "dtypes": dtypes,
        "shapes": {name: list(array.shape) for name, array in arrays.items()},
        "fleet_train": fleet_train.__version__,
        "paddle": installed_version(),
    }
    _publish(folder / TENSORS, tensors)
    _publish(folder / DESCRIPTION, json.dumps(description, indent=1, sort_keys=True).encode())


def _publish(path: Path, content: bytes) -> None:
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read_folder(folder: Path) -> Arrays:
    """The arrays that ``write_folder`` wrote. Raises CheckpointError for what is missing, cut off or altered."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        content = (folder / TENSORS).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no saved state: {Path(str(error.filename)).name} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / DESCRIPTION} is damaged: {error}") from None
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / DESCRIPTION}: format {description.get('format')!r}, this version reads {FORMAT}"
        )
    if hashlib.sha256(content).hexdigest() != description["sha256"]:
        raise CheckpointError(
            f"{folder / TENSORS} is cut off or altered: its content hash is not the one it was saved with"
        )
    try:
        arrays: Arrays = load_tensors(content)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / TENSORS} is damaged: {error}") from None
    return arrays


def refuse_other_model(arrays: Arrays, program: Any, scope: Any, source: Path) -> None:
    """Raise CheckpointError naming the first tensor that is missing, left over, or of another shape or dtype."""
    ours, _ = read_scope(program, scope)
    for name in sorted(ours):
        if name not in arrays:
            raise CheckpointError(f"{source} has no tensor '{name}', which this program needs: is it of another model?")
        found, needed = arrays[name], ours[name]
        if found.shape != needed.shape or found.dtype != needed.dtype:
            raise CheckpointError(
                f"{source}: '{name}' is {list(found.shape)} {found.dtype}, this program needs "
                f"{list(needed.shape)} {needed.dtype}"
            )
    unknown = sorted(name for name in set(arrays) - set(ours) if not name.startswith(POSITION_PREFIX))
    if unknown:
        raise CheckpointError(f"{source} has a tensor '{unknown[0]}' that this program does not have")


def write_scope(arrays: Arrays, program: Any, scope: Any, place: Any) -> None:
    """Put arrays (as ``read_scope`` gives them) back into the scope."""
    state = program.state_dict("all", scope)
    for name, variable in state.items():
        variable.set(arrays[name], place)


def export_inference_model(exe: Any, dirname: Path, feeds: list[Any], targets: list[Any], program: Any) -> None:
    """Write the pruned forward program and its parameters as ``model.json`` and ``model.pdiparams`` in ``dirname``."""
    dirname.mkdir(parents=True, exist_ok=True)
    paddle.static.save_inference_model(str(dirname / "model"), feeds, targets, exe, program=program)
