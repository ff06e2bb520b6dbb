"""Encodes float32 buffers in a few bits, with the fastest codec for the place of the tensors.

All codecs give the same bits. On a CPU numba compiles the loops; where it cannot be imported, numpy does the work. On
the wire, a buffer of blocks is one uint8 tensor: the levels, then the blocks' scales. With four bits, the lower half of
each byte holds the first half of a block, the upper half the second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import paddle

from fleet_train.collectives.paddle_compat import add_in_place, as_dtype, host_view
from fleet_train.errors import ConversionError
from fleet_train.profile.methods.base import QuantisedSettings
from fleet_train.profile.methods.quantised import SMALLEST, WHOLE

if TYPE_CHECKING:
    from fleet_train.collectives.methods.codec_loops import Loops


class Codec(Protocol):
    """Turns whole blocks of float32 into bytes and back. Tensors are flat."""

    def add(self, total: Any, tensors: Sequence[Any]) -> Any:
        """``total`` ([elements], float32) plus ``tensors``, concatenated from its start; may be in place."""

    def encode(self, values: Any, random: np.random.Generator | None = None) -> tuple[Any, Any]:
        """(what is sent, uint8; the rounding error, float32 of the shape of ``values``); may overwrite ``values``.

        A block with an infinity or NaN decodes to NaN on every rank, with an error of zero. ``random``: for
        stochastic rounding.
        """

    def decode(self, wires: Sequence[Any], factor: float, start: Any = None) -> Any:
        """``start`` plus the sum of the decoded ``wires``, in their order; their scales times ``factor``. float32."""


def make_codec(settings: QuantisedSettings, on_host: bool) -> Codec:
    """The codec for the place of tensors. ``on_host``: they are in the host's memory, and the host may read them.

    The first host codec compiles its loops, which takes seconds the first time on a machine.
    """
    if not on_host:
        return DeviceCodec(settings)
    loops = find_loops()
    return HostCodec(settings) if isinstance(loops, str) else CompiledCodec(settings, loops)


def notices_of(on_host: bool) -> list[str]:
    """A note to users about the codec that `make_codec` makes, or nothing."""
    loops = find_loops() if on_host else None
    if not isinstance(loops, str):
        return []
    return [f"numpy encodes int8 and int4 and takes several times the processor time: {loops}"]


Array = np.ndarray[Any, Any]

_PIECE_ELEMENTS = 65536
"""Elements per piece: a few temporaries of this size fit into a core's second-level cache."""


class HostCodec:
    """The codec for tensors in the host's memory: numpy reads and writes them in place, in pieces."""

    def __init__(self, settings: QuantisedSettings) -> None:
        self._settings = settings
        self._offset = offset_of(settings)

    def add(self, total: Any, tensors: Sequence[Any]) -> Any:
        return add_in_place(total, tensors)

    def encode(self, values: Any, random: np.random.Generator | None = None) -> tuple[Any, Any]:
        blocks = host_view(values).reshape(-1, self._settings.block)
        wire = paddle.empty([len(blocks) * self._settings.block_bytes], "uint8")
        self._encode_all(blocks, *cut(host_view(wire), self._settings), random)
        return wire, values

    def decode(self, wires: Sequence[Any], factor: float, start: Any = None) -> Any:
        views = [host_view(wire) for wire in wires]
        blocks = views[0].size // self._settings.block_bytes
        if any(view.size != blocks * self._settings.block_bytes for view in views):
            raise ConversionError(
                f"decode was given wires of {[view.size for view in views]} bytes; all must have the same size"
            )
        result = paddle.empty([blocks * self._settings.block], "float32") if start is None else start
        total = host_view(result).reshape(blocks, self._settings.block)
        self._decode_all(views, total, factor, start is None)
        return result

    def _encode_all(self, blocks: Array, levels: Array, scales: Array, random: np.random.Generator | None) -> None:
        work = self._work(len(blocks))
        with np.errstate(all="ignore"):
            for piece in pieces(len(blocks), self._settings):
                self._encode(blocks[piece], levels[piece], scales[piece], work, random)

    def _decode_all(self, wires: Sequence[Array], total: Array, factor: float, is_empty: bool) -> None:
        parts, work = [cut(wire, self._settings) for wire in wires], self._work(len(total))
        with np.errstate(all="ignore"):
            for piece in pieces(len(total), self._settings):
                for index, (levels, scales) in enumerate(parts):
                    self._decode(levels[piece], scales[piece], factor, total[piece], work, is_empty and not index)

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


def offset_of(settings: QuantisedSettings) -> Any:
    """The number that, added to one in units of its scale (float32), puts the level into the lowest byte."""
    return np.float32(WHOLE if settings.bits == 8 else WHOLE + 8)


def cut(wire: Array, settings: QuantisedSettings) -> tuple[Array, Array]:
    """The parts of a wire as views: (levels [blocks, bytes of a block], uint8; scales [blocks], float32)."""
    size = settings.block * settings.bits // 8
    blocks = wire.size // settings.block_bytes
    return wire[: blocks * size].reshape(blocks, size), wire[blocks * size :].view(np.float32)


def pieces(blocks: int, settings: QuantisedSettings) -> Iterator[slice]:
    """The pieces of this many blocks, in order."""
    step = _piece_blocks(settings)
    return (slice(first, min(first + step, blocks)) for first in range(0, blocks, step))


def drawn_bytes(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """uint8 of this shape, a multiple of 8 elements: the numbers of ``integers(0, 256)``, drawn 8 at a time."""
    words = random.integers(0, 2**64, size=math.prod(shape) // 8, dtype=np.uint64)
    return words.astype("<u8", copy=False).view(np.uint8).reshape(shape)


def _piece_blocks(settings: QuantisedSettings) -> int:
    return max(1, _PIECE_ELEMENTS // settings.block)


class CompiledCodec(HostCodec):
    """The host's codec with compiled loops: encoding reads each block once; decoding reads it once for all wires."""

    def __init__(self, settings: QuantisedSettings, loops: Loops) -> None:
        super().__init__(settings)
        self._loops = loops

    def _encode_all(self, blocks: Array, levels: Array, scales: Array, random: np.random.Generator | None) -> None:
        constants = (self._settings.levels, self._offset, np.float32(SMALLEST), np.float32(np.nan))
        if random is None:
            none = np.empty((len(blocks), 0), np.uint8)
            self._loops.encode(blocks, levels, scales, none, *constants)
            return
        for piece in pieces(len(blocks), self._settings):
            drawn = drawn_bytes(random, blocks[piece].shape)
            self._loops.encode(blocks[piece], levels[piece], scales[piece], drawn, *constants)

    def _decode_all(self, wires: Sequence[Array], total: Array, factor: float, is_empty: bool) -> None:
        addresses = np.array([wire.ctypes.data for wire in wires], np.int64)
        self._loops.decode(addresses, total, self._settings.bits, np.float32(factor), is_empty)


@functools.cache
def find_loops() -> Loops | str:
    """The loops of this process, compiled by the first call; or why there are none, and what to do."""
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT is set; unset it"
        from fleet_train.collectives.methods.codec_loops import compile_loops

        return compile_loops()
    except Exception as error:  # numba rejects versions of numpy and processors with many types of errors
        return f"numba does not work here ({type(error).__name__}: {error}); pip install numba"


class DeviceCodec:
    """The codec for tensors on a device, with Paddle's operators; the host waits for none of them.

    Gives the bits of `HostCodec`, except for its own random numbers.
    """

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
        # Both divided by a tensor: by a number, Paddle multiplies by its inverse, which changes the last bit.
        count, none = _filled(largest, float(self._settings.levels)), paddle.zeros_like(largest)
        scales = paddle.where(finite, paddle.where(usable, largest / count, none), _filled(largest, float("nan")))
        inverse = paddle.where(usable, count / largest, none)
        scaled = blocks * inverse
        if random is not None:
            scaled = scaled + self._dither(random, scaled.shape)
        whole = (scaled + WHOLE) - WHOLE
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
        """Uniform random numbers from -0.5 to 0.5, drawn on the device, in a different order than on the host."""
        seed = int(random.integers(1, 2**31 - 1))
        return paddle.uniform(list(shape), "float32", min=-0.5, max=0.5, seed=seed)


def _filled(like: Any, value: float) -> Any:
    return paddle.full_like(like, value)
