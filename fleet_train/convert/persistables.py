"""A program's state on disk: tensors as safetensors, what they are as JSON. No pickle, ever.

persistables.safetensors   one of each tensor: what a single card needs, and what every rank has alike
ranks.safetensors          what differs between the ranks, as "rank 0/<name>"; only where there is such state
persistables.json          of each tensor its kind, dtype, shape and SHA-256; written last
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleet_train
from fleet_train.collectives.paddle_check import installed_version
from fleet_train.convert import tensor_file
from fleet_train.convert.tensor_file import Arrays, Content
from fleet_train.errors import CheckpointError

TENSORS = "persistables.safetensors"
RANKS = "ranks.safetensors"
DESCRIPTION = "persistables.json"
FORMAT = 2


@dataclass(frozen=True)
class State:
    """What is saved. Names that begin with ``fleet_train/`` are no tensors of the program."""

    arrays: Arrays
    kinds: dict[str, str] = field(default_factory=dict)
    """Of the program's tensors: parameter (and statistics), optimizer, or pass."""
    ranks: list[Arrays] = field(default_factory=list)
    """What differs between the ranks, by rank; all have the same names. Empty where nothing does."""


def write_folder(folder: Path, state: State) -> None:
    """Write beside, sync, rename; the description comes last and fits no other tensors. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {TENSORS: state.arrays, RANKS: _with_ranks(state.ranks)}
    written = {name: tensor_file.write(_beside(folder, name), arrays) for name, arrays in files.items() if arrays}
    description = {
        "format": FORMAT,
        "fleet_train": fleet_train.__version__,
        "paddle": installed_version(),
        "ranks": len(state.ranks),
        "kinds": state.kinds,
        "files": {
            name: {tensor: content.as_json() for tensor, content in tensors.items()}
            for name, tensors in written.items()
        },
    }
    with _beside(folder, DESCRIPTION).open("wb") as file:
        file.write(json.dumps(description, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    for name in (*written, DESCRIPTION):
        os.replace(_beside(folder, name), folder / name)


def _beside(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"


def _with_ranks(ranks: list[Arrays]) -> Arrays:
    return {f"rank {rank}/{name}": array for rank, arrays in enumerate(ranks) for name, array in arrays.items()}


def read_folder(folder: Path) -> State:
    """The state that ``write_folder`` wrote. CheckpointError names what is missing, and the first tensor that is cut
    off or altered.
    """
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        if description["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / DESCRIPTION}: format {description['format']}, this version reads {FORMAT}"
            )
        files = {name: _contents(entries) for name, entries in description["files"].items()}
        arrays, mixed = (
            tensor_file.read(folder / name, files[name]) if name in files else {} for name in (TENSORS, RANKS)
        )
        ranks: list[Arrays] = [{} for _ in range(description["ranks"])]
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no saved state: {Path(str(error.filename)).name} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} is damaged: {error}") from None
    for name, array in mixed.items():
        rank, _, own = name.removeprefix("rank ").partition("/")
        ranks[int(rank)][own] = array
    return State(arrays, description["kinds"], ranks)


def _contents(entries: dict[str, Any]) -> dict[str, Content]:
    return {name: Content(**entry) for name, entry in entries.items()}
