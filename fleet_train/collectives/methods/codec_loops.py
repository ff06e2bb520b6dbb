"""The loops of `CompiledCodec`, compiled by numba for this processor. Nothing but `codec` may import this module.

Each operation is one of float32, rounded by itself as numpy's are: without ``fastmath`` no multiplication is fused
with an addition. The loops start no threads and release the GIL.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba.extending import intrinsic

_OPTIONS = {"nogil": True, "error_model": "numpy"}
_inlined = numba.njit(**_OPTIONS)
_F = np.float32
_SIGN = np.uint32(0x7FFFFFFF)
"""All bits of a float32 except the sign. As integers they are ordered like the absolute values; NaNs are above the
infinities."""
_INFINITY = np.uint32(0x7F800000)
_ENCODE = "void(float32[:,::1], uint8[:,::1], float32[::1], uint8[:,::1], int64, float32, float32, float32)"
_DECODE = "void(int64[::1], float32[:,::1], int64, float32, boolean)"


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any, kind: Any) -> Any:  # noqa: ARG001 - numba's signature
    """``address`` as a pointer to elements of ``kind``."""
    pointer = numba.types.CPointer(kind.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return pointer(address, kind), generate


@_inlined  # type: ignore[untyped-decorator]
def _largest_bits(row: Any) -> Any:
    largest, bits = np.uint32(0), row.view(np.uint32)
    for j in range(row.size):
        value = bits[j] & _SIGN
        largest = value if value > largest else largest
    return largest


@_inlined  # type: ignore[untyped-decorator]
def _round(row: Any, drawn: Any, rounded: Any, inverse: Any, scale: Any, offset: Any) -> None:
    """Write numbers with the levels in their lowest bytes to ``rounded``; leave the rounding error in ``row``."""
    if drawn.size:
        for j in range(row.size):
            dither = (_F(drawn[j]) - _F(127.5)) * _F(1 / 256)
            whole = (row[j] * inverse + dither) + offset
            rounded[j] = whole
            row[j] = row[j] - (whole - offset) * scale
    else:
        for j in range(row.size):
            whole = row[j] * inverse + offset
            rounded[j] = whole
            row[j] = row[j] - (whole - offset) * scale


@_inlined  # type: ignore[untyped-decorator]
def _pack(rounded: Any, levels: Any) -> None:
    """Write the lowest bytes of ``rounded`` into a byte each, or two of them into one."""
    bits, size = rounded.view(np.int32), levels.size
    if size == rounded.size:
        for j in range(size):
            levels[j] = np.uint8(bits[j])
    else:
        for j in range(size):
            levels[j] = np.uint8(bits[j] | (bits[j + size] << 4))


def _encode(
    blocks: Any, levels: Any, scales: Any, drawn: Any, count: int, offset: Any, smallest: Any, not_a_number: Any
) -> None:
    """Turn blocks [blocks, elements] into their rounding error, levels [blocks, bytes] and scales [blocks].

    ``drawn``: random bytes [blocks, elements], or [blocks, 0] to round to the nearest. ``count``: number of levels on
    each side of zero. ``smallest``: blocks below it are zeros.
    """
    rounded = np.empty(blocks.shape[1], np.float32)
    for i in range(blocks.shape[0]):
        row, bits = blocks[i], _largest_bits(blocks[i])
        rounded.view(np.uint32)[0] = bits
        largest = rounded[0]
        scale, inverse = _F(0), _F(0)
        if bits >= _INFINITY:
            scale = not_a_number
        elif largest >= smallest:
            scale, inverse = largest / _F(count), _F(count) / largest
        scales[i] = scale
        _round(row, drawn[i], rounded, inverse, scale, offset)
        _pack(rounded, levels[i])
        if bits >= _INFINITY:
            row[:] = _F(0)


@_inlined  # type: ignore[untyped-decorator]
def _read_8(levels: Any, scale: Any, row: Any, is_first: bool) -> None:
    if is_first:
        for j in range(row.size):
            row[j] = _F(levels[j]) * scale
    else:
        for j in range(row.size):
            row[j] = row[j] + _F(levels[j]) * scale


@_inlined  # type: ignore[untyped-decorator]
def _read_4(levels: Any, scale: Any, row: Any, is_first: bool) -> None:
    """Decode 4-bit levels, one loop per half row: contiguous writes, which the compiler can vectorize."""
    half = levels.size
    if is_first:
        for j in range(half):
            row[j] = _F(np.int32(levels[j] & np.uint8(15)) - np.int32(8)) * scale
        for j in range(half):
            row[half + j] = _F(np.int32(levels[j] >> np.uint8(4)) - np.int32(8)) * scale
    else:
        for j in range(half):
            row[j] = row[j] + _F(np.int32(levels[j] & np.uint8(15)) - np.int32(8)) * scale
        for j in range(half):
            row[half + j] = row[half + j] + _F(np.int32(levels[j] >> np.uint8(4)) - np.int32(8)) * scale


def _decode(wires: Any, total: Any, bits: int, factor: Any, is_first: bool) -> None:
    """Decode the wires at these addresses and add them, in their order, to total [blocks, elements].

    ``is_first``: total has no value yet.
    """
    blocks, block = total.shape
    size = block * bits // 8
    for i in range(blocks):
        row = total[i]
        for k in range(wires.size):
            scale = numba.carray(_pointer(wires[k] + blocks * size, numba.float32), (blocks,))[i] * factor
            start = wires[k] + i * size
            if bits == 8:
                _read_8(numba.carray(_pointer(start, numba.int8), (size,)), scale, row, is_first and k == 0)
            else:
                _read_4(numba.carray(_pointer(start, numba.uint8), (size,)), scale, row, is_first and k == 0)


@dataclass(frozen=True)
class Loops:
    """The compiled `_encode` and `_decode`, with their arguments."""

    encode: Callable[..., None]
    decode: Callable[..., None]


def compile_loops() -> Loops:
    """Compile the loops now, or read them from this user's cache, which is separate for each processor type and source.

    Without a writable folder they are compiled again; a folder with unreadable files is removed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = _cache_folder()
        if folder is not None:
            try:
                with _cached_in(folder):
                    return _compile(cache=True)
            except Exception:  # any error of pickle, numba or a full disk
                shutil.rmtree(folder, ignore_errors=True)
        return _compile(cache=False)


def _compile(cache: bool) -> Loops:
    make = numba.njit
    return Loops(
        make(_ENCODE, cache=cache, **_OPTIONS)(_encode),
        make(_DECODE, cache=cache, **_OPTIONS)(_decode),
    )


def _cache_folder() -> Path | None:
    """The cache's folder of this user, this source and this kind of processor: numba's own index is not safe when
    processes write different entries at the same time. ``NUMBA_CACHE_DIR`` or ``XDG_CACHE_HOME`` selects the parent
    folder."""
    parts = [Path(__file__).read_text(encoding="utf-8"), numba.__version__, binding.get_host_cpu_name()]
    parts.append(binding.get_host_cpu_features().flatten())
    name = f"fleet_train-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
    try:
        users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(numba.config.CACHE_DIR or users) / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except (OSError, RuntimeError):
        return None
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if is_ours and os.access(folder, os.W_OK) else None


_CONFIG = threading.Lock()


@contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    with _CONFIG:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before
