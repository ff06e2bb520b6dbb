"""A program's state on disk: tensors as safetensors, everything else as JSON. Never pickle.

persistables.safetensors   one of each tensor: what a single card needs, and what is equal on every rank
ranks.safetensors          what differs between the ranks, as "rank 0/<name>"; only if there is such state
complete.json              each tensor's kind, dtype, shape and SHA-256, in a checkpoint of a trainer also its state,
                           score and run; begins with the SHA-256 of its own rest; written last
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import fleet_train
from fleet_train.collectives.paddle_compat import installed_version
from fleet_train.convert import safetensors_file
from fleet_train.convert.program_state import OPTIMIZER, PARAMETER, PASS
from fleet_train.convert.safetensors_file import WAY_OUT, Arrays, Content
from fleet_train.errors import CheckpointError
from fleet_train.files import NotThatFile, open_new, parse_json, read_regular, write_all

TENSORS = "persistables.safetensors"
RANKS = "ranks.safetensors"
DESCRIPTION = "complete.json"
FORMAT = 3
_TENSORS_OF_FORMAT_2, _STATE_OF_FORMAT_2 = "persistables.json", "state.json"
FILES = (TENSORS, RANKS, _TENSORS_OF_FORMAT_2, _STATE_OF_FORMAT_2, DESCRIPTION)
"""All files that a saved state may have, in any format; the last one is written last."""
_MOST_BYTES = 256 << 20
_OF_A_RANK = re.compile(r"rank (0|[1-9][0-9]{0,8})/(.+)", re.DOTALL)
_SEAL = b'{"sha256": "%s",'
_SEAL_BYTES = len(_SEAL % bytes(64))


@dataclass(frozen=True)
class State:
    """The saved state. Names that begin with ``fleet_train/`` are not tensors of the program."""

    arrays: Arrays
    kinds: dict[str, str] = field(default_factory=dict)
    """Of the program's tensors: parameter (and statistics), optimizer, or pass."""
    ranks: list[Arrays] = field(default_factory=list)
    """What differs between the ranks, by rank; all have the same names. Empty if nothing differs."""


def write_folder(folder: Path, state: State) -> None:
    """Write and publish the state. Raises OSError with what was saved there before unchanged."""
    publish(folder, write_tensors(folder, state))


def write_tensors(folder: Path, state: State) -> dict[str, Any]:
    """Write the tensors under temporary names, synced; returns what ``publish`` is to say of them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {TENSORS: state.arrays, RANKS: _with_ranks(state.ranks)}
    written = {name: safetensors_file.write(_beside(folder, name), arrays) for name, arrays in files.items() if arrays}
    return {
        "fleet_train": fleet_train.__version__,
        "paddle": installed_version(),
        "ranks": len(state.ranks),
        "kinds": state.kinds,
        "files": {
            name: {tensor: content.as_json() for tensor, content in tensors.items()}
            for name, tensors in written.items()
        },
    }


def publish(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the entries, synced, and give all files their names: the description last, which matches only them.

    Raises OSError.
    """
    with open_new(_beside(folder, DESCRIPTION)) as file:
        write_all(file, sealed({"format": FORMAT, **entries}))
        os.fsync(file.fileno())
    for name in (*entries["files"], DESCRIPTION):
        os.replace(_beside(folder, name), folder / name)
    (folder / _TENSORS_OF_FORMAT_2).unlink(missing_ok=True)  # it described the tensors that were here before


def sealed(entries: Mapping[str, Any]) -> bytes:
    """The entries as JSON that begins with the SHA-256 of its rest."""
    rest = json.dumps(entries, indent=1).encode()[1:]
    return _seal_of(rest) + rest


def _seal_of(rest: bytes) -> bytes:
    return _SEAL % hashlib.sha256(rest).hexdigest().encode()


def _beside(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"


def _with_ranks(ranks: list[Arrays]) -> Arrays:
    return {f"rank {rank}/{name}": array for rank, arrays in enumerate(ranks) for name, array in arrays.items()}


def read_folder(folder: Path) -> State:
    """The state that ``write_folder`` wrote. CheckpointError names what is missing, and the first tensor that is cut
    off or altered.
    """
    entries = read_entries(folder)
    try:
        files, kinds, number = _tensors_of(entries)
    except ValueError as error:
        raise CheckpointError(f"{folder / _describing(entries)} is damaged: {error}; {WAY_OUT}") from None
    try:
        arrays, mixed = (
            safetensors_file.read(folder / name, files[name]) if files[name] else {} for name in (TENSORS, RANKS)
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no saved state: {Path(str(error.filename)).name} is missing") from None
    ranks: list[Arrays] = [{} for _ in range(number)]
    for name, array in mixed.items():
        rank, own = _rank_and_name(name)
        ranks[rank][own] = array
    return State(arrays, kinds, ranks)


def read_entries(folder: Path) -> dict[str, Any]:
    """What ``publish`` wrote, unaltered; the tensors' files are not read. CheckpointError names the file that is
    missing, damaged or altered.
    """
    path = folder / DESCRIPTION
    if os.path.lexists(path) or not os.path.lexists(folder / _TENSORS_OF_FORMAT_2):
        content = _content(path)
        entries = _parsed(path, content)
        if entries.get("format") == 2:
            entries = _read_format_2(folder, entries)
        elif entries.get("format") != FORMAT:
            _refuse_format(path, entries)
        elif not content.startswith(_seal_of(content[_SEAL_BYTES:])):
            raise _altered(path)
    else:
        entries = _read_format_2(folder, None)
    files = entries.get("files")
    if not isinstance(files, dict) or files.keys() - {TENSORS, RANKS}:
        damaged = folder / _describing(entries)
        raise CheckpointError(f"{damaged} is damaged: its files are not {TENSORS} and {RANKS}; {WAY_OUT}")
    return entries


def _describing(entries: Mapping[str, Any]) -> str:
    """The file that describes the tensors."""
    return DESCRIPTION if entries["format"] == FORMAT else _TENSORS_OF_FORMAT_2


def _read_format_2(folder: Path, marker: Mapping[str, Any] | None) -> dict[str, Any]:
    """What earlier versions wrote, as ``read_entries`` returns it: the tensors' description and, in a checkpoint,
    the state in files of their own, whose SHA-256 are in the ``marker``, which was ``complete.json``.
    """
    path = folder / _TENSORS_OF_FORMAT_2
    content = _content(path)
    entries = _parsed(path, content)
    if entries.get("format") != 2:
        _refuse_format(path, entries)
    if marker is None:
        return entries
    state = _content(folder / _STATE_OF_FORMAT_2)
    digests = marker.get("files")
    for name, written in ((_TENSORS_OF_FORMAT_2, content), (_STATE_OF_FORMAT_2, state)):
        if not isinstance(digests, dict) or hashlib.sha256(written).hexdigest() != digests.get(name):
            raise _altered(folder / name)
    state_entries = _parsed(folder / _STATE_OF_FORMAT_2, state)
    return {**entries, "state": state_entries, "score": marker.get("score"), "run": marker.get("run")}


def _refuse_format(path: Path, entries: Mapping[str, Any]) -> NoReturn:
    told = f"{entries.get('format')!r:.40}"
    raise CheckpointError(f"{path}: format {told}; this version reads formats 2 and {FORMAT}")


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no saved state: {path.name} is missing; {WAY_OUT}") from None
    except NotThatFile as error:
        raise CheckpointError(f"{path} {error}; {WAY_OUT}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {WAY_OUT}") from None


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; {WAY_OUT}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it is not a mapping of names to values; {WAY_OUT}")
    return value


def _altered(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} was altered after it was written (SHA-256 differs); {WAY_OUT}")


def _tensors_of(entries: Mapping[str, Any]) -> tuple[dict[str, dict[str, Content]], dict[str, str], int]:
    """(tensors by file, kinds, number of ranks). Raises ValueError for anything that ``write_tensors`` does not
    return."""
    kinds = entries.get("kinds")
    files = {name: _contents(entries["files"].get(name, {})) for name in (TENSORS, RANKS)}
    own = [_rank_and_name(name) for name in files[RANKS]]
    if not isinstance(kinds, dict) or not all(kind in (PARAMETER, OPTIMIZER, PASS) for kind in kinds.values()):
        raise ValueError("its kinds are not those of tensors")
    if strange := sorted(kinds.keys() - files[TENSORS].keys() - {name for _, name in own}):
        raise ValueError(f"it has the kind of '{strange[0]}', but no such tensor")
    return files, kinds, _number_of_ranks(entries.get("ranks"), files[RANKS])


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


Described = Mapping[str, tuple[str, list[int], str]]
"""Kind, shape and dtype by name."""


def fit(saved: Described, ours: Described, source: str) -> tuple[list[str], list[str]]:
    """Compare saved tensors with the program's own: the names of those to load, and notes to the user about the rest.

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
    return [name for name in ours if name in saved], notes


def _several(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"
