"""A program's state on disk: tensors as safetensors, their description as JSON. Never pickle.

persistables.safetensors   one of each tensor: what a single card needs, and what is equal on every rank
ranks.safetensors          what differs between the ranks, as "rank 0/<name>"; only if there is such state
persistables.json          each tensor's kind, dtype, shape and SHA-256; written last
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleet_train
from fleet_train.collectives.paddle_compat import installed_version
from fleet_train.convert.state import safetensors_file
from fleet_train.convert.state.program_state import OPTIMIZER, PARAMETER, PASS
from fleet_train.convert.state.safetensors_file import Arrays, Content
from fleet_train.errors import CheckpointError
from fleet_train.files import NotThatFile, open_new, parse_json, read_regular, write_all

TENSORS = "persistables.safetensors"
RANKS = "ranks.safetensors"
DESCRIPTION = "persistables.json"
FORMAT = 2
_MOST_BYTES = 256 << 20
_OF_A_RANK = re.compile(r"rank (0|[1-9][0-9]{0,8})/(.+)", re.DOTALL)
_WAY_OUT = "load another saved state"


@dataclass(frozen=True)
class State:
    """The saved state. Names that begin with ``fleet_train/`` are not tensors of the program."""

    arrays: Arrays
    kinds: dict[str, str] = field(default_factory=dict)
    """Of the program's tensors: parameter (and statistics), optimizer, or pass."""
    ranks: list[Arrays] = field(default_factory=list)
    """What differs between the ranks, by rank; all have the same names. Empty if nothing differs."""


def write_folder(folder: Path, state: State) -> None:
    """Write temporary files, sync, rename; the description is last and matches only these tensors. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {TENSORS: state.arrays, RANKS: _with_ranks(state.ranks)}
    written = {name: safetensors_file.write(_beside(folder, name), arrays) for name, arrays in files.items() if arrays}
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
    with open_new(_beside(folder, DESCRIPTION)) as file:
        write_all(file, json.dumps(description, indent=1).encode())
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
        files, kinds, number = _description(read_regular(folder / DESCRIPTION, _MOST_BYTES))
        arrays, mixed = (
            safetensors_file.read(folder / name, files[name]) if files[name] else {} for name in (TENSORS, RANKS)
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no saved state: {Path(str(error.filename)).name} is missing") from None
    except NotThatFile as error:
        raise CheckpointError(f"{folder / DESCRIPTION} {error}; {_WAY_OUT}") from None
    except _OtherFormat as error:
        raise CheckpointError(f"{folder / DESCRIPTION}: format {error}, this version reads {FORMAT}") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / DESCRIPTION} is damaged: {error}; {_WAY_OUT}") from None
    ranks: list[Arrays] = [{} for _ in range(number)]
    for name, array in mixed.items():
        rank, own = _rank_and_name(name)
        ranks[rank][own] = array
    return State(arrays, kinds, ranks)


class _OtherFormat(Exception):
    """The file has another format number."""


def _description(content: bytes) -> tuple[dict[str, dict[str, Content]], dict[str, str], int]:
    """(tensors by file, kinds, number of ranks). Raises ValueError for anything that ``write_folder`` does not
    write."""
    told = parse_json(content)
    if not isinstance(told, dict) or "format" not in told:
        raise ValueError("it has no format")
    if told["format"] != FORMAT:
        raise _OtherFormat(f"{told['format']!r:.40}")
    found, kinds, number = told.get("files"), told.get("kinds"), told.get("ranks")
    if not isinstance(found, dict) or found.keys() - {TENSORS, RANKS}:
        raise ValueError(f"its files are not {TENSORS} and {RANKS}")
    files = {name: _contents(found.get(name, {})) for name in (TENSORS, RANKS)}
    own = [_rank_and_name(name) for name in files[RANKS]]
    if not isinstance(kinds, dict) or not all(kind in (PARAMETER, OPTIMIZER, PASS) for kind in kinds.values()):
        raise ValueError("its kinds are not those of tensors")
    if strange := sorted(kinds.keys() - files[TENSORS].keys() - {name for _, name in own}):
        raise ValueError(f"it has the kind of '{strange[0]}', but no such tensor")
    return files, kinds, _number_of_ranks(number, files[RANKS])


def _contents(entries: Any) -> dict[str, Content]:
    if not isinstance(entries, dict):
        raise ValueError("the tensors of a file are not a section")
    contents = {}
    for name, entry in entries.items():
        try:
            contents[name] = Content.from_json(entry)
        except ValueError as error:
            raise ValueError(f"tensor '{name}': {error}") from None
    return contents


def _rank_and_name(name: str) -> tuple[int, str]:
    """``rank 3/w`` -> ``(3, "w")``. Raises ValueError."""
    found = _OF_A_RANK.fullmatch(name)
    if found is None:
        raise ValueError(f"'{name}' is not a tensor of a rank")
    return int(found[1]), found[2]


def _number_of_ranks(told: Any, contents: dict[str, Content]) -> int:
    """Returns ``told``. Raises ValueError unless this number of ranks have the same tensors, except for their
    values."""
    by_rank: dict[int, dict[str, tuple[str, list[int]]]] = {}
    for name, content in contents.items():
        rank, own = _rank_and_name(name)
        by_rank.setdefault(rank, {})[own] = (content.dtype, content.shape)
    number = len(by_rank)
    if type(told) is not int or told != number or by_rank.keys() != set(range(number)):
        raise ValueError(f"it has tensors of {len(by_rank)} ranks, which is not the number that it gives")
    for rank, tensors in by_rank.items():
        if tensors != by_rank[0]:
            raise ValueError(f"rank {rank} has different tensors from rank 0")
    return number


# Whether saved tensors fit a program: a pure comparison of names, kinds, shapes and dtypes.


Described = Mapping[str, tuple[str, list[int], str]]
"""Kind, shape and dtype by name."""


@dataclass(frozen=True)
class Fit:
    """``names``: the tensors to load. ``notes``: notes to the user about the rest."""

    names: list[str]
    notes: list[str]


def fit(saved: Described, ours: Described, source: str) -> Fit:
    """Compare saved tensors with the program's own.

    Parameters and optimizer state must exist, with the same shapes and dtypes, and nothing may be left over; but a
    program without an optimizer (for evaluation) ignores saved optimizer state. State of the profile's passes (gradient
    merge's sums, the loss scale) may exist on one side only. CheckpointError names the first tensor that does not fit.
    """
    for name in sorted(ours):
        kind, shape, dtype = ours[name]
        if name in saved and (shape, dtype) != tuple(saved[name][1:]):
            raise CheckpointError(
                f"{source}: '{name}' is {saved[name][1]} {saved[name][2]}, this program needs {shape} {dtype}"
            )
        if name not in saved and kind != PASS:
            raise CheckpointError(
                f"{source} has no tensor '{name}', which this program needs: is it from another model?"
            )
    trains = any(kind == OPTIMIZER for kind, _, _ in ours.values())
    aside = {PASS} if trains else {PASS, OPTIMIZER}
    left_over = sorted(name for name in saved if name not in ours)
    for name in left_over:
        if saved[name][0] not in aside:
            raise CheckpointError(f"{source} has a tensor '{name}' that this program does not have")
    notes = []
    if started := sorted(name for name in ours if name not in saved):
        notes.append(f"{source} has no {_several(started)}, which keep their start values")
    if trains and left_over:
        notes.append(f"{source} has {_several(left_over)}, which this profile does not use")
    return Fit([name for name in ours if name in saved], notes)


def _several(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"
