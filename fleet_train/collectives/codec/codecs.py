"""Encodes float32 buffers in a few bits, with the fastest codec for the place of the tensors.

All codecs give the same bits. On the wire, a buffer of blocks is one uint8 tensor: the levels, then the blocks' scales.
With four bits, the lower half of each byte holds the first half of a block, the upper half the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fleet_train.collectives.codec.compiled import CompiledCodec, find_loops
from fleet_train.collectives.codec.device import DeviceCodec
from fleet_train.collectives.codec.host import HostCodec
from fleet_train.plan.quantised import QuantisedSettings


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
    """``on_host``: tensors are in the host's memory, and the host may read them.

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
