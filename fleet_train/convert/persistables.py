"""A program's state on disk: tensors as safetensors, everything else as JSON. Never pickle.

persistables.safetensors   one of each tensor: what a single card needs, and what is equal on every rank
ranks.safetensors          what differs between the ranks, as "rank 0/<name>"; only if there is such state
complete.json              each tensor's kind, dtype, shape and SHA-256, the state of a script's learning-rate schedule,
                           in a checkpoint of a trainer also its state, score and run; begins with the SHA-256 of its
                           own rest

A file is written as ``<name>.part``. The rename of ``complete.json`` publishes a state; the tensors' follow it.

A safetensors file is 8 bytes little endian, the header's length; the header, JSON of ``{name: {dtype, shape,
data_offsets}}``; the tensors' bytes without gaps. Source: https://huggingface.co/docs/safetensors. It is written
without a second copy in memory, and read so that damage is attributed to a tensor: the package ``safetensors`` reads
what is written here, but its own reader names no tensor when a file is truncated, and its writer needs all bytes in one
piece.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

import fleet_train
from fleet_train.collectives.paddle_compat import installed_version
from fleet_train.convert.program_state import OPTIMIZER, PARAMETER, PASS, Array, Arrays, SavedState
from fleet_train.errors import CheckpointError
from fleet_train.files import NotThatFile, open_new, open_regular, parse_json, read_regular, sync_folder, write_all

TENSORS = "persistables.safetensors"
RANKS = "ranks.safetensors"
DESCRIPTION = "complete.json"
FORMAT = 3
FILES = (TENSORS, RANKS, DESCRIPTION)
"""All files that a saved state may have."""
_MOST_BYTES = 256 << 20
_OF_A_RANK = re.compile(r"rank (0|[1-9][0-9]{0,8})/(.+)", re.DOTALL)
_SEAL = b'{"sha256": "%s",'
_SEAL_BYTES = len(_SEAL % bytes(64))

_CODES = {"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64"}
_CODES |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_LENGTH_BYTES = 8
_MOST_DIMENSIONS = 32  # numpy's, before 2.0
WAY_OUT = "load another saved state, or remove this folder: a run resumes from the checkpoint before it"
_CHUNK = 16 << 20


def write_tensors(folder: Path, state: SavedState) -> dict[str, Any]:
    """Write the tensors under temporary names, synced; returns what ``publish`` is to say of them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _finish(folder)
    files = {TENSORS: state.arrays, RANKS: _with_ranks(state.ranks)}
    written = {name: write_safetensors(_draft_of(folder, name), arrays) for name, arrays in files.items() if arrays}
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
    """Write the entries, synced, and give all files their names. Raises OSError.

    The description gets its name first, and from then on the folder holds the new state: where the tensors that it
    describes do not have theirs yet, they are read under their temporary ones.
    """
    with open_new(_draft_of(folder, DESCRIPTION)) as file:
        write_all(file, sealed({"format": FORMAT, **entries}))
        os.fsync(file.fileno())
    os.replace(_draft_of(folder, DESCRIPTION), folder / DESCRIPTION)
    sync_folder(folder)
    for name in entries["files"]:
        os.replace(_draft_of(folder, name), folder / name)


def _finish(folder: Path) -> None:
    """Complete a ``publish`` that was interrupted: what the next one writes has the same temporary names."""
    left = [name for name in (TENSORS, RANKS) if os.path.lexists(_draft_of(folder, name))]
    try:
        files = _tensors_of(read_entries(folder))[0] if left else {}
    except (CheckpointError, ValueError):
        return  # the folder holds no state
    for name in left:
        if _read_draft(folder, name, files[name]) is not None:
            os.replace(_draft_of(folder, name), folder / name)


def _read_draft(folder: Path, name: str, written: Mapping[str, Content]) -> Arrays | None:
    """The tensors under their temporary name, if there are those that were ``written``; remains of a save that was
    interrupted before it was published are others."""
    try:
        return read_safetensors(_draft_of(folder, name), written) if written else None
    except (OSError, CheckpointError):
        return None


def _read_file(folder: Path, name: str, written: Mapping[str, Content]) -> Arrays:
    draft = _read_draft(folder, name, written)
    return read_safetensors(folder / name, written) if draft is None else draft


def sealed(entries: Mapping[str, Any]) -> bytes:
    """The entries as JSON that begins with the SHA-256 of its rest."""
    rest = json.dumps(entries, indent=1).encode()[1:]
    return _seal_of(rest) + rest


def _seal_of(rest: bytes) -> bytes:
    return _SEAL % hashlib.sha256(rest).hexdigest().encode()


def _draft_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"


def _with_ranks(ranks: list[Arrays]) -> Arrays:
    return {f"rank {rank}/{name}": array for rank, arrays in enumerate(ranks) for name, array in arrays.items()}


def read_folder(folder: Path) -> SavedState:
    """The state that ``publish`` has completed. CheckpointError names what is missing, and the first tensor that is cut
    off or altered.
    """
    entries = read_entries(folder)
    try:
        files, kinds, number = _tensors_of(entries)
    except ValueError as error:
        raise CheckpointError(f"{folder / DESCRIPTION} is damaged: {error}; {WAY_OUT}") from None
    try:
        arrays, mixed = (_read_file(folder, name, files[name]) if files[name] else {} for name in (TENSORS, RANKS))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no saved state: {Path(str(error.filename)).name} is missing") from None
    ranks: list[Arrays] = [{} for _ in range(number)]
    for name, array in mixed.items():
        rank, own = _rank_and_name(name)
        ranks[rank][own] = array
    return SavedState(arrays, kinds, ranks)


def read_entries(folder: Path) -> dict[str, Any]:
    """What ``publish`` wrote, unaltered; the tensors' files are not read. CheckpointError names the file that is
    missing, damaged or altered.
    """
    path = folder / DESCRIPTION
    content = _content(path)
    entries = _parsed(path, content)
    if entries.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {entries.get('format')!r:.40}; this version reads format {FORMAT}")
    if not content.startswith(_seal_of(content[_SEAL_BYTES:])):
        raise CheckpointError(f"{path} was altered after it was written (SHA-256 differs); {WAY_OUT}")
    files = entries.get("files")
    if not isinstance(files, dict) or files.keys() - {TENSORS, RANKS}:
        raise CheckpointError(f"{path} is damaged: its files are not {TENSORS} and {RANKS}; {WAY_OUT}")
    return entries


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        found = "name the folder that fleet.save_persistables wrote"
        if any(path.parent.parent.glob(f"{path.parent.name}.pd*")) or any(path.parent.glob("*.pd*")):
            found = "files of paddle.static.save are read by paddle.static.load(program, prefix), on each rank"
        raise CheckpointError(f"{path.parent} holds no saved state: {path.name} is missing; {found}") from None
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


def _tensors_of(entries: Mapping[str, Any]) -> tuple[dict[str, dict[str, Content]], dict[str, str], int]:
    """Read a description: (tensors by file, kinds, number of ranks). Raises ValueError for anything that
    ``write_tensors`` does not return."""
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
    match = _OF_A_RANK.fullmatch(name)
    if match is None:
        raise ValueError(f"'{name}' is not a tensor of a rank")
    return int(match[1]), match[2]


def _number_of_ranks(given: Any, contents: dict[str, Content]) -> int:
    """Returns ``given``. Raises ValueError unless this number of ranks have the same tensors, except for their
    values."""
    by_rank: dict[int, dict[str, tuple[str, list[int]]]] = {}
    for name, content in contents.items():
        rank, own = _rank_and_name(name)
        by_rank.setdefault(rank, {})[own] = (content.dtype, content.shape)
    number = len(by_rank)
    if type(given) is not int or given != number or by_rank.keys() != set(range(number)):
        raise ValueError(f"it has tensors of {number} ranks, which is not the number that it gives")
    for rank, tensors in by_rank.items():
        if tensors != by_rank[0]:
            raise ValueError(f"rank {rank} has different tensors from rank 0")
    return number


@dataclass(frozen=True)
class Content:
    """A tensor's description when it was written; ``dtype`` is numpy's name, ``sha256`` of its bytes."""

    dtype: str
    shape: list[int]
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Any) -> Content:
        """The reverse of ``as_json``. Raises ValueError that says what is wrong, also for sizes that no file has."""
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "sha256"}:
            raise ValueError("it is not an entry of dtype, shape and sha256")
        dtype, shape, sha256 = entry["dtype"], entry["shape"], entry["sha256"]
        if not isinstance(dtype, str) or dtype not in _CODES:
            raise ValueError("its dtype is unknown")
        if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or not all(map(_is_size, shape)):
            raise ValueError("its shape is not a list of sizes")
        if math.prod(size for size in shape if size) * np.dtype(dtype).itemsize >= 1 << 62:
            raise ValueError("its shape has more elements than fit in any memory")
        if not isinstance(sha256, str):
            raise ValueError("its sha256 is not text")
        return cls(dtype, shape, sha256)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def write_safetensors(path: Path, arrays: Mapping[str, Array]) -> dict[str, Content]:
    """Write C-contiguous arrays as a new file, synced to the disk. Raises OSError."""
    header, _ = _layout({name: Content(_dtype(array), list(array.shape), "") for name, array in arrays.items()})
    contents = {}
    with open_new(path) as file:
        write_all(file, header)
        for name, array in arrays.items():
            digest = hashlib.sha256()
            for chunk in _chunks(array):
                digest.update(chunk)
                write_all(file, chunk)
            contents[name] = Content(array.dtype.name, list(array.shape), digest.hexdigest())
        os.fsync(file.fileno())
    return contents


def read_safetensors(path: Path, written: Mapping[str, Content]) -> Arrays:
    """The arrays of a file, each compared with what was written. CheckpointError names the first that differs.

    No memory is allocated for data that the file does not have. What was written determines the header, which is
    therefore compared and not parsed.
    """
    try:
        with open_regular(path) as file:
            return _read_tensors(file, path, written)
    except NotThatFile as error:
        raise CheckpointError(f"{path} {error}; {WAY_OUT}") from None


def _read_tensors(file: BufferedReader, path: Path, written: Mapping[str, Content]) -> Arrays:
    arrays = {}
    header, ends = _layout(written)
    first = f"before its first tensor '{next(iter(written))}'" if written else "in its header"
    size = os.fstat(file.fileno()).st_size
    if size < len(header):
        raise CheckpointError(f"{path} is cut off {first}: it has {size} bytes; {WAY_OUT}")
    if file.read(len(header)) != header:
        raise CheckpointError(f"{path} was altered {first}: its header is not the one that was written; {WAY_OUT}")
    for name, end in ends.items():
        if end > size:
            raise CheckpointError(
                f"{path} is cut off in tensor '{name}', which ends at byte {end}: it has {size}; {WAY_OUT}"
            )
    for name, content in written.items():
        arrays[name] = array = np.empty(content.shape, content.dtype)
        digest = hashlib.sha256()
        for chunk in _chunks(array):
            file.readinto(chunk)
            digest.update(chunk)
        if digest.hexdigest() != content.sha256:
            raise CheckpointError(
                f"{path}: tensor '{name}' was altered after it was written (SHA-256 differs); {WAY_OUT}"
            )
    return arrays


def _layout(contents: Mapping[str, Content]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and the byte at which each ends."""
    entries: dict[str, Any] = {}
    end = 0
    for name, content in contents.items():
        begin, end = end, end + content.nbytes
        entries[name] = {"dtype": _CODES[content.dtype], "shape": content.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the tensors begin on a multiple of 8
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header, {name: len(header) + entry["data_offsets"][1] for name, entry in entries.items()}


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _dtype(array: Array) -> str:
    """The name of an array's dtype; CheckpointError for one that no file can have."""
    if array.dtype.name not in _CODES or array.dtype.byteorder == ">":
        raise CheckpointError(f"tensors of dtype {array.dtype} cannot be saved")
    return str(array.dtype.name)


def _chunks(array: Array) -> Iterator[memoryview]:
    """The array's memory in pieces that are hashed and written without the GIL."""
    flat: Any = memoryview(array.reshape(-1).view(np.uint8).data) if array.size else b""
    return (flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK))
