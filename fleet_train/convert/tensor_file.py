"""A safetensors file, written without a second copy in memory and read so that damage is put down to a tensor.

The format: 8 bytes little endian, the header's length; the header, JSON of ``{name: {dtype, shape, data_offsets}}``;
the tensors' bytes without gaps. Source: https://huggingface.co/docs/safetensors. The package ``safetensors`` reads what
is written here; its own reader names no tensor when a file is cut off, and its writer needs all bytes in one piece.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleet_train.errors import CheckpointError

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

_CODES = {"f": "F", "i": "I", "u": "U"}
_LENGTH_BYTES = 8
_CHUNK = 16 << 20


@dataclass(frozen=True)
class Content:
    """What a tensor was when it was written; ``dtype`` is numpy's name, ``sha256`` of its bytes."""

    dtype: str
    shape: list[int]
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def write(path: Path, arrays: Mapping[str, Array]) -> dict[str, Content]:
    """Write C-contiguous arrays as a new file, synced to the disk. Raises OSError."""
    header: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        header[name] = {"dtype": _code(array), "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the tensors begin on a multiple of 8
    contents = {}
    with path.open("wb", buffering=0) as file:
        _write_all(file, len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for name, array in arrays.items():
            digest = hashlib.sha256()
            for chunk in _chunks(array):
                digest.update(chunk)
                _write_all(file, chunk)
            contents[name] = Content(array.dtype.name, list(array.shape), digest.hexdigest())
        os.fsync(file.fileno())
    return contents


def read(path: Path, written: Mapping[str, Content]) -> Arrays:
    """The arrays of a file, each compared with what was written. CheckpointError names the first that is not that."""
    arrays = {}
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin, header = _read_header(path, file, size, written)
        for name, content in written.items():
            place = _place_of(path, name, header.get(name), content)
            if begin + place[1] > size:
                raise CheckpointError(
                    f"{path} is cut off in tensor '{name}', which ends at byte {begin + place[1]}: it has {size}"
                )
            arrays[name] = array = np.empty(content.shape, content.dtype)
            file.seek(begin + place[0])
            digest = hashlib.sha256()
            for chunk in _chunks(array):
                file.readinto(chunk)
                digest.update(chunk)
            if digest.hexdigest() != content.sha256:
                raise CheckpointError(f"{path}: tensor '{name}' was altered after it was written (SHA-256 differs)")
    return arrays


def _code(array: Array) -> str:
    if array.dtype == np.bool_:
        return "BOOL"
    if array.dtype.kind not in _CODES or array.dtype.byteorder == ">":
        raise CheckpointError(f"tensors of dtype {array.dtype} cannot be saved")
    return f"{_CODES[array.dtype.kind]}{8 * array.dtype.itemsize}"


def _chunks(array: Array) -> Iterator[memoryview]:
    """The array's memory in pieces that are hashed and written without the interpreter's lock."""
    flat: Any = memoryview(array.reshape(-1).view(np.uint8).data) if array.size else b""
    return (flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK))


def _write_all(file: Any, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]  # a disk that fills up takes a part first


def _read_header(path: Path, file: Any, size: int, written: Mapping[str, Content]) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and what the file says of each."""
    first = f"before its first tensor '{next(iter(written))}'" if written else "in its header"
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES + length:
        raise CheckpointError(f"{path} is cut off {first}: it has {size} bytes")
    try:
        header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError
    except ValueError:
        raise CheckpointError(f"{path} was altered {first}: its header is no JSON") from None
    return _LENGTH_BYTES + length, header


def _place_of(path: Path, name: str, entry: Any, content: Content) -> tuple[int, int]:
    """Where a tensor's bytes begin and end."""
    count = int(np.prod(content.shape, dtype=np.int64)) * np.dtype(content.dtype).itemsize
    try:
        begin, end = entry["data_offsets"]
        fits = entry["shape"] == content.shape and begin >= 0 and end - begin == count
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise CheckpointError(f"{path}: tensor '{name}' was altered after it was written (the header's entry differs)")
    return int(begin), int(end)
