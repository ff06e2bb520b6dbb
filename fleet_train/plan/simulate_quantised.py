"""Quantised sums in numpy for all ranks in one process: the reference for tests of the real ones.

In float32, like the real ones: whether a value is above or below the middle of two levels can depend on the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet_train.plan.phases import local_groups
from fleet_train.plan.simulate_methods import Array, Gradients, SimulatedParts, scaled
from fleet_train.profile.methods.base import QuantisedSettings
from fleet_train.profile.methods.quantised import SMALLEST, QuantisedLayout, quantised_settings


class QuantisedSimulation:
    """Integers with a scale per block; between the local groups' leaders, if there are local groups."""

    def __init__(self, parts: SimulatedParts) -> None:
        bucket, plan = parts.bucket, parts.plan
        settings = quantised_settings(parts.profile, bucket.compression)
        self._parts = parts
        self._sum = QuantisedSum(bucket.gradients[0].name, bucket.elements, plan.world_size, plan.group_size, settings)

    def step(self, gradients: Gradients) -> list[Array]:
        """The result on every rank, in the bucket's order and shapes, float32."""
        return self._parts.split(scaled(self._sum.sum(self._parts.joined(gradients)), len(gradients)))


class QuantisedSum:
    """The sum of one flat float32 buffer over all ranks, or, with local groups, over the sums of their members."""

    def __init__(self, name: str, elements: int, world_size: int, group_size: int, settings: QuantisedSettings) -> None:
        self._local_groups = local_groups(world_size, group_size or 1)
        self._layout = QuantisedLayout(elements, len(self._local_groups), settings)
        self._settings, self._name, self._step = settings, name, 0
        self.owed = [np.zeros(self._layout.padded_elements, np.float32) for _ in self._local_groups]
        """The rounding errors by member."""

    def sum(self, buffers: Sequence[Array]) -> Array:
        """``buffers[rank]`` [elements] -> their sum on every rank, float32."""
        self._step += 1
        elements = self._layout.elements
        for owed, members in zip(self.owed, self._local_groups, strict=True):
            total = np.sum([buffers[rank] for rank in members], axis=0, dtype=np.float64)
            owed[:elements] += total.astype(np.float32)
        total = self._whole() if self._layout.parts == 1 else self._in_parts()
        if not self._settings.error_feedback:
            self.owed = [np.zeros_like(owed) for owed in self.owed]
        return np.asarray(total[:elements])

    def _whole(self) -> Array:
        sent = [self._rounded(owed, member, 0) for member, owed in enumerate(self.owed)]
        for owed, one in zip(self.owed, sent, strict=True):
            _keep(owed, one)
        return _added(sent)

    def _in_parts(self) -> Array:
        size = self._layout.part_elements
        sent = [self._rounded(owed, member, 0) for member, owed in enumerate(self.owed)]
        result = np.zeros(self._layout.padded_elements, np.float32)
        for owner in range(self._layout.parts):
            part = slice(owner * size, (owner + 1) * size)
            others = [one[part] for member, one in enumerate(sent) if member != owner]
            total = _added([self.owed[owner][part].copy(), *others])
            result[part] = self._rounded(total, owner, 1)
            _keep(total, result[part])
            for member, owed in enumerate(self.owed):
                if member == owner:
                    owed[part] = total
                else:
                    _keep(owed[part], sent[member][part])
        return result

    def _rounded(self, values: Array, member: int, phase: int) -> Array:
        """The decoded ``values`` on a receiver."""
        count = np.float32(self._settings.levels)
        blocks = values.reshape(-1, self._settings.block)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            scales = np.where(largest < np.float32(SMALLEST), np.float32(0), largest / count)
            inverse = np.where(largest < np.float32(SMALLEST), np.float32(0), count / largest)
            scaled = blocks * inverse
            if self._settings.stochastic:
                scaled = scaled + self._dither(member, phase, scaled.shape)
            rounded = np.rint(scaled) * scales
        return np.asarray(np.where(np.isfinite(largest), rounded, np.float32("nan")).reshape(-1), dtype=np.float32)

    def _dither(self, member: int, phase: int, shape: tuple[int, ...]) -> Array:
        random = self._settings.dither(self._name, member, phase, self._step)
        drawn = random.integers(0, 256, size=shape, dtype=np.uint8)
        return np.asarray((drawn.astype(np.float32) - np.float32(127.5)) / np.float32(256))


def _keep(owed: Array, sent: Array) -> None:
    """Store the rounding error in ``owed``; zero for blocks with an infinity or NaN."""
    owed[:] = np.where(np.isfinite(sent), owed - sent, np.float32(0))


def _added(parts: Sequence[Array]) -> Array:
    """The float32 sum, one after the other."""
    total: Array = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total
