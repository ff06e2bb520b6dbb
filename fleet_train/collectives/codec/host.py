"""Encodes float32 buffers in host memory in a few bits with numpy, in pieces that fit into a core's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.paddle_compat.host_views import add_in_place, host_view
from fleet_train.plan.quantised import SMALLEST, WHOLE, QuantisedSettings

Array = np.ndarray[Any, Any]

_PIECE_ELEMENTS = 65536
"""Elements per piece: a few temporaries of this size fit into a core's second-level cache."""


def offset_of(settings: QuantisedSettings) -> Any:
    """Added to a number in units of its scale (float32), it puts the level into the lowest byte."""
    return np.float32(WHOLE if settings.bits == 8 else WHOLE + 8)


def cut(wire: Array, settings: QuantisedSettings) -> tuple[Array, Array]:
    """(levels [blocks, bytes of a block], uint8; scales [blocks], float32): views of the wire."""
    size = settings.block * settings.bits // 8
    blocks = wire.size // settings.block_bytes
    return wire[: blocks * size].reshape(blocks, size), wire[blocks * size :].view(np.float32)


def pieces(blocks: int, settings: QuantisedSettings) -> Iterator[slice]:
    """Of this many blocks, in order."""
    step = _piece_blocks(settings)
    return (slice(first, min(first + step, blocks)) for first in range(0, blocks, step))


def drawn_bytes(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """uint8 of this shape, a multiple of 8 elements: the numbers of ``integers(0, 256)``, drawn 8 at a time."""
    words = random.integers(0, 2**64, size=math.prod(shape) // 8, dtype=np.uint64)
    return words.astype("<u8", copy=False).view(np.uint8).reshape(shape)


def _piece_blocks(settings: QuantisedSettings) -> int:
    return max(1, _PIECE_ELEMENTS // settings.block)


class HostCodec:
    """For tensors in the host's memory, which numpy reads and writes in place."""

    def __init__(self, settings: QuantisedSettings) -> None:
        self._settings = settings
        self._offset = offset_of(settings)

    def add(self, total: Any, tensors: Sequence[Any]) -> Any:
        return add_in_place(total, tensors)

    def encode(self, values: Any, random: np.random.Generator | None = None) -> tuple[Any, Any]:
        blocks = host_view(values).reshape(-1, self._settings.block)
        wire = paddle.empty([len(blocks) * self._settings.block_bytes], "uint8")
        levels, scales = cut(host_view(wire), self._settings)
        work = self._work(len(blocks))
        with np.errstate(all="ignore"):
            for piece in pieces(len(blocks), self._settings):
                self._encode(blocks[piece], levels[piece], scales[piece], work, random)
        return wire, values

    def decode(self, wires: Sequence[Any], factor: float, start: Any = None) -> Any:
        parts = [cut(host_view(wire), self._settings) for wire in wires]
        blocks = len(parts[0][1])
        result = paddle.empty([blocks * self._settings.block], "float32") if start is None else start
        total = host_view(result).reshape(blocks, self._settings.block)
        work = self._work(blocks)
        with np.errstate(all="ignore"):
            for piece in pieces(blocks, self._settings):
                for index, (levels, scales) in enumerate(parts):
                    self._decode(levels[piece], scales[piece], factor, total[piece], work, start is None and not index)
        return result

    def _work(self, blocks: int) -> Array:
        return np.empty((min(blocks, _piece_blocks(self._settings)), self._settings.block), np.float32)

    def _encode(
        self, blocks: Array, levels: Array, scales: Array, work: Array, random: np.random.Generator | None
    ) -> None:
        largest = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))  # NaN wins in both
        inverse = _scales(largest, scales, self._settings.levels)
        work = work[: len(blocks)]
        np.multiply(blocks, inverse[:, None], out=work)
        if random is not None:
            work += _dither(random, work.shape)
        np.add(work, self._offset, out=work)
        lowest = work.view(np.uint8)[:, ::4]
        if self._settings.bits == 8:
            levels[:] = lowest
        else:
            _pack(lowest, levels)
        np.subtract(work, self._offset, out=work)
        np.multiply(work, scales[:, None], out=work)
        np.subtract(blocks, work, out=blocks)
        if not np.isfinite(scales).all():
            blocks[~np.isfinite(scales)] = 0

    def _decode(self, levels: Array, scales: Array, factor: float, total: Array, work: Array, is_first: bool) -> None:
        target = total if is_first else work[: len(levels)]
        if self._settings.bits == 8:
            np.copyto(target, levels.view(np.int8))
        else:
            half = levels.shape[1]
            np.copyto(target[:, :half], (levels & 15).view(np.int8) - np.int8(8))
            np.copyto(target[:, half:], (levels >> 4).view(np.int8) - np.int8(8))
        np.multiply(target, (scales * np.float32(factor))[:, None], out=target)
        if not is_first:
            np.add(total, target, out=total)


def _scales(largest: Array, scales: Array, levels: int) -> Array:
    """Write the blocks' scales; returns their inverses. Blocks of tiny values have the scale 0."""
    usable = largest >= np.float32(SMALLEST)
    np.divide(largest, np.float32(levels), out=scales)
    scales[~usable & ~np.isnan(largest)] = 0
    scales[~np.isfinite(largest)] = np.nan
    inverse = np.zeros_like(largest)
    np.divide(np.float32(levels), largest, out=inverse, where=usable)
    return inverse


def _dither(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Uniform between -0.5 and 0.5 in 256 steps, float32."""
    drawn = drawn_bytes(random, shape).astype(np.float32)
    drawn -= np.float32(127.5)
    drawn *= np.float32(1 / 256)
    return drawn


def _pack(lowest: Array, levels: Array) -> None:
    half = levels.shape[1]
    np.left_shift(lowest[:, half:], 4, out=levels)
    np.bitwise_or(levels, lowest[:, :half], out=levels)
