"""Quantised gradients, as a bucket method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet_train.collectives.engine import HAND_OVER, Stages
from fleet_train.collectives.methods.dense import Cut, flatten, unflatten
from fleet_train.collectives.methods.quantised_sum import Carried, KeptErrors
from fleet_train.collectives.methods.registry import Parts
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket
from fleet_train.profile.methods.quantised import quantised_settings


class QuantisedMethod(KeptErrors):
    """Sends integers with a scale per block; with local groups, only between their leaders."""

    def __init__(self, bucket: Bucket, carried: Carried, world_size: int, cut: Cut | None = None) -> None:
        super().__init__("quantised", bucket.gradients, carried.rounded)
        self._bucket = bucket
        self._sums = carried.sums
        self._scale = 1.0 / world_size
        self._cut = cut or unflatten

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        if self._sums is self._rounded:
            self._rounded.add(gradients)
            yield HAND_OVER
            total = yield from self._rounded.sum_added(self._scale)
        else:
            flat = flatten(gradients)
            yield HAND_OVER
            (total,) = yield from self._sums.sum([flat])
            total = total.scale_(self._scale)
        return self._cut(total, [gradient.shape for gradient in self._bucket.gradients])


def make_method(parts: Parts) -> QuantisedMethod:
    """The method of a plan's bucket."""
    bucket = parts.bucket
    if parts.quantised is None:
        raise ConversionError(f"compression: {bucket.compression} was planned without links for quantised sums")
    settings = quantised_settings(parts.profile, bucket.compression)
    carried = parts.quantised.make(bucket.communicator, bucket.gradients[0].name, bucket.elements, settings)
    return QuantisedMethod(bucket, carried, parts.plan.world_size, parts.cut)
