"""A safetensors file, written without a second copy in memory and read so that damage is attributed to a tensor.

The format: 8 bytes little endian, the header's length; the header, JSON of ``{name: {dtype, shape, data_offsets}}``;
the tensors' bytes without gaps. Source: https://huggingface.co/docs/safetensors. The package ``safetensors`` reads what
is written here; its own reader names no tensor when a file is truncated, and its writer needs all bytes in one piece.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from fleet_train.errors import CheckpointError
from fleet_train.files import NotThatFile, open_new, open_regular, write_all

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

_CODES = {"f": "F", "i": "I", "u": "U"}
_DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = frozenset((*_DTYPES, "float16", "float32", "float64"))
_LENGTH_BYTES = 8
_MOST_DIMENSIONS = 32  # numpy's, before 2.0
WAY_OUT = "load another saved state, or remove this folder: a run resumes from the checkpoint before it"
_CHUNK = 16 << 20


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
        if not isinstance(dtype, str) or dtype not in DTYPES:
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


def write(path: Path, arrays: Mapping[str, Array]) -> dict[str, Content]:
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


def read(path: Path, written: Mapping[str, Content]) -> Arrays:
    """The arrays of a file, each compared with what was written. CheckpointError names the first that differs.

    No memory is allocated for data that the file does not have. What was written determines the header, which is
    therefore compared and not parsed.
    """
    arrays = {}
    header, ends = _layout(written)
    first = f"before its first tensor '{next(iter(written))}'" if written else "in its header"
    with _opened(path) as file:
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
        entries[name] = {"dtype": _code(content.dtype), "shape": content.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the tensors begin on a multiple of 8
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header, {name: len(header) + entry["data_offsets"][1] for name, entry in entries.items()}


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    with ExitStack() as opened:
        try:
            file = opened.enter_context(open_regular(path))
        except NotThatFile as error:
            raise CheckpointError(f"{path} {error}; {WAY_OUT}") from None
        yield file


def _dtype(array: Array) -> str:
    """Its name; CheckpointError for one that no file can have."""
    if array.dtype.name not in DTYPES or array.dtype.byteorder == ">":
        raise CheckpointError(f"tensors of dtype {array.dtype} cannot be saved")
    return str(array.dtype.name)


def _code(dtype: str) -> str:
    return "BOOL" if dtype == "bool" else f"{_CODES[dtype[0]]}{8 * np.dtype(dtype).itemsize}"


def _chunks(array: Array) -> Iterator[memoryview]:
    """The array's memory in pieces that are hashed and written without the GIL."""
    flat: Any = memoryview(array.reshape(-1).view(np.uint8).data) if array.size else b""
    return (flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK))
