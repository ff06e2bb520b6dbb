"""Encodes float32 buffers in host memory in a few bits with compiled loops, where numba can be imported."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from fleet_train.collectives.codec.host import cut, drawn_bytes, offset_of, pieces
from fleet_train.collectives.paddle_compat.host_views import add_in_place, host_view
from fleet_train.errors import ConversionError
from fleet_train.plan.quantised import SMALLEST, QuantisedSettings

if TYPE_CHECKING:
    from fleet_train.collectives.codec.loops import Loops


@functools.cache
def find_loops() -> Loops | str:
    """The loops of this process, compiled by the first call; or why there are none, and what to do."""
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT is set; unset it"
        from fleet_train.collectives.codec.loops import compile_loops

        return compile_loops()
    except Exception as error:  # numba rejects versions of numpy and processors with many types of errors
        return f"numba does not work here ({type(error).__name__}: {error}); pip install numba"


class CompiledCodec:
    """Gives the bits of `HostCodec`: encoding reads each block once; decoding reads it once for all wires."""

    def __init__(self, settings: QuantisedSettings, loops: Loops) -> None:
        self._settings = settings
        self._loops = loops

    def add(self, total: Any, tensors: Sequence[Any]) -> Any:
        return add_in_place(total, tensors)

    def encode(self, values: Any, random: np.random.Generator | None = None) -> tuple[Any, Any]:
        settings = self._settings
        blocks = host_view(values).reshape(-1, settings.block)
        wire = paddle.empty([len(blocks) * settings.block_bytes], "uint8")
        levels, scales = cut(host_view(wire), settings)
        constants = (settings.levels, offset_of(settings), np.float32(SMALLEST), np.float32(np.nan))
        if random is None:
            none = np.empty((len(blocks), 0), np.uint8)
            self._loops.encode(blocks, levels, scales, none, *constants)
        else:
            for piece in pieces(len(blocks), settings):
                drawn = drawn_bytes(random, blocks[piece].shape)
                self._loops.encode(blocks[piece], levels[piece], scales[piece], drawn, *constants)
        return wire, values

    def decode(self, wires: Sequence[Any], factor: float, start: Any = None) -> Any:
        settings, views = self._settings, [host_view(wire) for wire in wires]
        blocks = views[0].size // settings.block_bytes
        if any(view.size != blocks * settings.block_bytes for view in views):
            raise ConversionError(
                f"decode was given wires of {[view.size for view in views]} bytes; all must have the same size"
            )
        result = paddle.empty([blocks * settings.block], "float32") if start is None else start
        total = host_view(result).reshape(blocks, settings.block)
        addresses = np.array([view.ctypes.data for view in views], np.int64)
        self._loops.decode(addresses, total, settings.bits, np.float32(factor), start is None)
        return result
