"""Float32 buffers as few bits and back: on a CPU in numpy, over pieces that stay in its cache; elsewhere on the device.

Both give the same bits. A buffer of blocks on the wire is first its levels, then the blocks' scales, in one uint8
tensor. Four bits: the first half of a block lies in the lower half of its bytes, the second half in the upper one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import paddle

from fleet_train.collectives.casting import as_dtype
from fleet_train.plan.quantised import SMALLEST, QuantisedSettings

Array = np.ndarray[Any, Any]

_WHOLE = 12582912.0
"""1.5 * 2**23: a float32 of this size has no fraction, so that adding it rounds to the nearest whole number (ties to
even), which then stands in the lowest byte."""
_PIECE_ELEMENTS = 65536
"""What is treated at a time on a CPU: a few temporaries of this size fit into a core's second cache."""


class Codec(Protocol):
    """Turns whole blocks of float32 into bytes and back. Tensors are flat."""

    def add(self, total: Any, tensors: Sequence[Any]) -> Any:
        """``total`` ([elements], float32) plus ``tensors``, one behind the other from its start; may be in place."""

    def encode(self, values: Any, random: np.random.Generator | None = None) -> tuple[Any, Any]:
        """(what is sent, uint8; what it leaves out of ``values``, float32 of their shape); may overwrite ``values``.

        A block with an infinity or NaN becomes NaN on every reader, and leaves out nothing. ``random``: for
        stochastic rounding.
        """

    def decode(self, wires: Sequence[Any], factor: float, start: Any = None) -> Any:
        """``start`` plus the sum of what ``wires`` say, in their order; their scales times ``factor``. float32."""


class HostCodec:
    """For tensors in the host's memory, which numpy reads and writes in place."""

    def __init__(self, settings: QuantisedSettings) -> None:
        self._settings = settings
        self._offset = np.float32(_WHOLE if settings.bits == 8 else _WHOLE + 8)

    def add(self, total: Any, tensors: Sequence[Any]) -> Any:
        buffer, start = np.from_dlpack(total), 0
        for tensor in tensors:
            values = np.from_dlpack(as_dtype(tensor, "float32").reshape([-1]))
            part = buffer[start : start + values.size]
            np.add(part, values, out=part)
            start += values.size
        return total

    def encode(self, values: Any, random: np.random.Generator | None = None) -> tuple[Any, Any]:
        blocks = np.from_dlpack(values).reshape(-1, self._settings.block)
        wire = paddle.empty([len(blocks) * self._settings.block_bytes], "uint8")
        levels, scales = self._cut(np.from_dlpack(wire))
        work = np.empty_like(blocks[: self._piece_blocks])
        with np.errstate(all="ignore"):
            for piece in self._pieces(len(blocks)):
                self._encode(blocks[piece], levels[piece], scales[piece], work, random)
        return wire, values

    def decode(self, wires: Sequence[Any], factor: float, start: Any = None) -> Any:
        parts = [self._cut(np.from_dlpack(wire)) for wire in wires]
        blocks = len(parts[0][1])
        result = paddle.empty([blocks * self._settings.block], "float32") if start is None else start
        total = np.from_dlpack(result).reshape(blocks, -1)
        work = np.empty_like(total[: self._piece_blocks])
        with np.errstate(all="ignore"):
            for piece in self._pieces(blocks):
                for index, (levels, scales) in enumerate(parts):
                    self._decode(levels[piece], scales[piece], factor, total[piece], work, start is None and not index)
        return result

    @property
    def _piece_blocks(self) -> int:
        return max(1, _PIECE_ELEMENTS // self._settings.block)

    def _pieces(self, blocks: int) -> Iterator[slice]:
        return (slice(first, min(first + self._piece_blocks, blocks)) for first in range(0, blocks, self._piece_blocks))

    def _cut(self, wire: Array) -> tuple[Array, Array]:
        """(levels [blocks, bytes of a block], uint8; scales [blocks], float32): views of the wire."""
        blocks = wire.size // self._settings.block_bytes
        cut = blocks * self._settings.block * self._settings.bits // 8
        return wire[:cut].reshape(blocks, -1), wire[cut:].view(np.float32)

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
    """Write the blocks' scales; returns the inverse ones. Blocks of next to nothing have the scale 0."""
    usable = largest >= np.float32(SMALLEST)
    np.divide(largest, np.float32(levels), out=scales)
    scales[~usable & ~np.isnan(largest)] = 0
    scales[~np.isfinite(largest)] = np.nan
    inverse = np.zeros_like(largest)
    np.divide(np.float32(levels), largest, out=inverse, where=usable)
    return inverse


def _dither(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Evenly spread between -0.5 and 0.5 in 256 steps, float32."""
    drawn = random.integers(0, 256, size=shape, dtype=np.uint8).astype(np.float32)
    drawn -= np.float32(127.5)
    drawn *= np.float32(1 / 256)
    return drawn


def _pack(lowest: Array, levels: Array) -> None:
    half = levels.shape[1]
    np.left_shift(lowest[:, half:], 4, out=levels)
    np.bitwise_or(levels, lowest[:, :half], out=levels)


class DeviceCodec:
    """For tensors on a device: operators of Paddle's, nothing of which the host waits for."""

    def __init__(self, settings: QuantisedSettings) -> None:
        self._settings = settings

    def add(self, total: Any, tensors: Sequence[Any]) -> Any:
        parts = [as_dtype(tensor, "float32").reshape([-1]) for tensor in tensors]
        rest = total.shape[0] - sum(part.shape[0] for part in parts)
        return total.add_(paddle.concat([*parts, paddle.zeros([rest], "float32")] if rest else parts))

    def encode(self, values: Any, random: np.random.Generator | None = None) -> tuple[Any, Any]:
        blocks = values.reshape([-1, self._settings.block])
        largest = blocks.abs().max(axis=1, keepdim=True)
        largest = paddle.where(paddle.isnan(blocks).any(axis=1, keepdim=True), _filled(largest, float("nan")), largest)
        usable, finite = largest >= SMALLEST, paddle.isfinite(largest)
        # Both divided by a tensor: Paddle multiplies by the inverse of a number, which is another last bit.
        count, none = _filled(largest, float(self._settings.levels)), paddle.zeros_like(largest)
        scales = paddle.where(finite, paddle.where(usable, largest / count, none), _filled(largest, float("nan")))
        inverse = paddle.where(usable, count / largest, none)
        scaled = blocks * inverse
        if random is not None:
            scaled = scaled + self._dither(random, scaled.shape)
        whole = (scaled + _WHOLE) - _WHOLE
        left = paddle.where(finite, blocks - whole * scales, paddle.zeros_like(blocks))
        whole = paddle.where(finite, whole, paddle.zeros_like(whole))
        wire = [self._packed(whole).reshape([-1]), paddle.view(scales.reshape([-1]), "uint8")]
        return paddle.concat(wire), left.reshape([-1])

    def decode(self, wires: Sequence[Any], factor: float, start: Any = None) -> Any:
        total = start
        for wire in wires:
            blocks = wire.shape[0] // self._settings.block_bytes
            cut = blocks * self._settings.block * self._settings.bits // 8
            scales = paddle.view(wire[cut:].clone(), "float32").reshape([blocks, 1]) * factor
            values = (self._unpacked(wire[:cut].reshape([blocks, -1])) * scales).reshape([-1])
            total = values if total is None else total + values
        return total

    def _packed(self, whole: Any) -> Any:
        """uint8 levels of whole float32 numbers [blocks, elements]."""
        if self._settings.bits == 8:
            return paddle.view(whole.cast("int8"), "uint8")
        lower, upper = paddle.split(whole + 8.0, 2, axis=1)
        return (lower + 16.0 * upper).cast("uint8")

    def _unpacked(self, levels: Any) -> Any:
        if self._settings.bits == 8:
            return paddle.view(levels, "int8").cast("float32")
        number = levels.cast("float32")
        upper = paddle.floor(number * (1 / 16))
        return paddle.concat([number - 16.0 * upper, upper], axis=1) - 8.0

    def _dither(self, random: np.random.Generator, shape: Sequence[int]) -> Any:
        """As on the host; drawn on the device, in an order of its own."""
        seed = int(random.integers(1, 2**31 - 1))
        return paddle.uniform(list(shape), "float32", min=-0.5, max=0.5, seed=seed)


def _filled(like: Any, value: float) -> Any:
    return paddle.full_like(like, value)


def make_codec(settings: QuantisedSettings, on_host: bool) -> Codec:
    """``on_host``: tensors are in the host's memory, and the host may read them."""
    return HostCodec(settings) if on_host else DeviceCodec(settings)
