"""Float32 buffers as few bits and back, by who does it quickest where the tensors are.

All give the same bits. A buffer of blocks on the wire is first its levels, then the blocks' scales, in one uint8
tensor. Four bits: the first half of a block lies in the lower half of its bytes, the second half in the upper one.
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
        """``total`` ([elements], float32) plus ``tensors``, one behind the other from its start; may be in place."""

    def encode(self, values: Any, random: np.random.Generator | None = None) -> tuple[Any, Any]:
        """(what is sent, uint8; what it leaves out of ``values``, float32 of their shape); may overwrite ``values``.

        A block with an infinity or NaN becomes NaN on every reader, and leaves out nothing. ``random``: for
        stochastic rounding.
        """

    def decode(self, wires: Sequence[Any], factor: float, start: Any = None) -> Any:
        """``start`` plus the sum of what ``wires`` say, in their order; their scales times ``factor``. float32."""


def make_codec(settings: QuantisedSettings, on_host: bool) -> Codec:
    """``on_host``: tensors are in the host's memory, and the host may read them.

    The first one on a host compiles its loops, which takes seconds the first time on a machine.
    """
    if not on_host:
        return DeviceCodec(settings)
    loops = find_loops()
    return HostCodec(settings) if isinstance(loops, str) else CompiledCodec(settings, loops)


def notices_of(on_host: bool) -> list[str]:
    """What users should know of the codec that `make_codec` makes, or nothing."""
    loops = find_loops() if on_host else None
    if not isinstance(loops, str):
        return []
    return [f"numpy encodes int8 and int4, in several times the processor time: {loops}"]
