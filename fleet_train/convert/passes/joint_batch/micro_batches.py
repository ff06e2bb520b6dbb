"""Micro-batches of unlike counts: each is weighted by what its loss was divided by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.utils import unique_name

from fleet_train.convert.passes.program import persistable


class MicroBatches:
    """Appends the weights of one program's micro-batches, relative to the first one of an update: equal counts have
    weights of exactly 1."""

    def __init__(self, count: Any, micro_batches: int) -> None:
        """``count``: of this micro-batch, float64 []. At the current insertion point."""
        first = persistable(unique_name.generate("gradient_merge_first_count"), paddle.float64)
        weights = persistable(unique_name.generate("gradient_merge_weights"), paddle.float64)
        count = count.reshape([1])
        one = paddle.ones_like(count)
        reference = paddle.where(first == 0, paddle.where(count == 0, one, count), first)
        self._weight = count / reference
        self._total = weights + self._weight
        paddle.assign(reference, first)
        paddle.assign(self._total, weights)
        self._micro_batches = micro_batches
        self.buffers = (first, weights)
        """Variables that are to be 0 after an update."""

    def weighted(self, loss: Any) -> Any:
        """``loss`` times the weight of this micro-batch."""
        return loss * self._weight.cast(loss.dtype).reshape([1] * len(loss.shape))

    def of_update(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The pairs of an update, with gradients over the weights' sum instead of the number of micro-batches."""
        return [
            (parameter, gradient if gradient is None else gradient * self.factor.cast(gradient.dtype))
            for parameter, gradient in pairs
        ]

    @property
    def factor(self) -> Any:
        """What averaged gradients are to be multiplied by, float64 [1]; at the current insertion point."""
        return float(self._micro_batches) / self._total
