"""Sums over all ranks as computed by the plan's collectives, and the bytes that each rank sends for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet_train.plan.compression_settings import Array
from fleet_train.plan.hierarchy import local_groups
from fleet_train.plan.phases import CollectiveSpec, phases_of, sent_by_rank
from fleet_train.plan.plan import ITEM_BYTES, CommPlan
from fleet_train.plan.simulate.compression import ring_sum_16_bit, rounding_of


class SimulatedWire:
    """The collectives of one plan on arrays of all ranks. ``sent`` [ranks] float64: payload bytes since ``take``."""

    def __init__(self, plan: CommPlan) -> None:
        self._plan = plan
        self.sent = np.zeros(plan.world_size)

    def take(self) -> tuple[float, ...]:
        """The bytes that each rank has sent since the last call."""
        sent = tuple(float(nbytes) for nbytes in self.sent)
        self.sent[:] = 0
        return sent

    def count(self, payload: CollectiveSpec) -> None:
        """Count one collective over all ranks, without carrying it out."""
        phases = phases_of(self._plan.world_size, self._plan.team_size, payload)
        self.sent += sent_by_rank(phases, self._plan.world_size)

    def sum(self, buffers: Sequence[Array], dtype: str = "float32", between: str = "") -> Array:
        """The sum over the ranks of flat buffers [elements], one per rank, sent as ``dtype``.

        ``between``: the dtype between the leaders of a hierarchical allreduce, if it differs. Sums in
        float32 and float64 are rounded once (a backend rounds each partial sum, in its own order); those of 16
        bits as Gloo's ring rounds them. 16-bit sums are returned as float32.
        """
        between = between or dtype
        item_bytes = ITEM_BYTES[dtype]
        self.count(CollectiveSpec("allreduce", buffers[0].size * item_bytes, item_bytes, ITEM_BYTES[between]))
        if not self._plan.team_size:
            return _ring(buffers, dtype)
        members = local_groups(self._plan.world_size, self._plan.team_size)
        return _ring([_ring([buffers[rank] for rank in local_group], dtype) for local_group in members], between)

    def mean(self, buffers: Sequence[Array], dtype: str = "float32", between: str = "") -> Array:
        """``sum`` over the number of ranks."""
        total = self.sum(buffers, dtype, between)
        return np.asarray(total * total.dtype.type(1.0 / self._plan.world_size))


def _ring(buffers: Sequence[Array], dtype: str) -> Array:
    rounded = rounding_of(dtype)
    if rounded is not None:
        return ring_sum_16_bit(buffers, rounded)
    return np.asarray(np.sum(buffers, axis=0, dtype=np.float64).astype(dtype))
