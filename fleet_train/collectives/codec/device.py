"""Encodes float32 tensors on a device in a few bits, with Paddle's operators; the host waits for none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.paddle_compat.casting import as_dtype
from fleet_train.plan.quantised import SMALLEST, WHOLE, QuantisedSettings


class DeviceCodec:
    """Gives the bits of `HostCodec`, except for its own random numbers."""

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
        """As on the host; drawn on the device, in a different order."""
        seed = int(random.integers(1, 2**31 - 1))
        return paddle.uniform(list(shape), "float32", min=-0.5, max=0.5, seed=seed)


def _filled(like: Any, value: float) -> Any:
    return paddle.full_like(like, value)
