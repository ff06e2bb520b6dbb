"""A sharded optimizer's exchange of gradients in numpy, for N ranks in one process: the reference of the real one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet_train.plan.phases import local_groups
from fleet_train.plan.shards import layout_of
from fleet_train.plan.simulate_methods import (
    Array,
    Gradients,
    QuantisedSum,
    SimulatedParts,
    added_up,
    scaled,
    to_bfloat16,
    to_float16,
)
from fleet_train.profile.methods import compression_of
from fleet_train.profile.methods.base import Piece
from fleet_train.profile.methods.quantised import BITS


class ShardedSimulation:
    """A sharded bucket in numpy: every owner's sum, in the ranks' order, of its own values and the others'."""

    def __init__(self, parts: SimulatedParts) -> None:
        bucket, plan = parts.bucket, parts.plan
        self._bucket = bucket
        self._groups = local_groups(plan.world_size, plan.owners)
        self._dtype = bucket.dtype
        self._wire = compression_of(bucket.compression).wire_dtype
        self._sums: list[QuantisedSum] = []
        if bucket.compression in BITS:
            layout, name = layout_of(bucket, parts.profile), bucket.gradients[0].name
            self._sums = [
                QuantisedSum(name, layout.elements, plan.owners, 0, layout.settings, layout) for _ in self._groups
            ]

    def step(self, gradients: Gradients) -> list[Array]:
        """The result on every rank, in the bucket's order and shapes, in its dtype."""
        sums = [
            self._sum_of(index, [self._wires(gradients[rank]) for rank in ranks])
            for index, ranks in enumerate(self._groups)
        ]
        total = np.sum(sums, axis=0, dtype=np.float64).astype(self._dtype) if len(sums) > 1 else sums[0]
        mean = scaled(total, len(gradients))
        results = [np.zeros(gradient.shape, self._dtype) for gradient in self._bucket.gradients]
        for member, pieces in enumerate(self._bucket.shards):
            start = 0
            for piece in pieces:
                target = self._rows(piece, results)
                target[...] = mean[member, start : start + target.size].reshape(target.shape)
                start += target.size
        return results

    def _sum_of(self, index: int, wires: Sequence[Array]) -> Array:
        """The sum of a group's wires, [owners, elements of a wire]."""
        if self._sums:
            return self._sums[index].sum_of_parts(wires)
        rounded = {"bfloat16": to_bfloat16, "float16": to_float16}.get(self._wire, np.asarray)
        return np.stack(
            [
                added_up(
                    [wire[owner] if member == owner else rounded(wire[owner]) for member, wire in enumerate(wires)]
                )
                for owner in range(len(wires))
            ]
        )

    def _wires(self, gradients: Sequence[Array]) -> Array:
        wires = np.zeros((len(self._bucket.shards), self._bucket.part_elements), self._dtype)
        for wire, pieces in zip(wires, self._bucket.shards, strict=True):
            flat = [np.ravel(self._rows(piece, gradients)) for piece in pieces]
            wire[: sum(values.size for values in flat)] = np.concatenate(flat) if flat else 0
        return wires

    def _rows(self, piece: Piece, values: Sequence[Array]) -> Array:
        whole = values[piece.gradient]
        return whole[piece.first : piece.first + piece.rows] if piece.rows else whole
