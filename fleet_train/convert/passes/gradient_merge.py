"""Gradient merge: one update, and one communication, per ``accumulate_steps`` micro-batches.

The gradients are summed in the main block, each after the operator that makes it, so that launch operators can follow
the sums and communication still overlaps the last backward pass. Only the update is conditional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.convert.passes.conditional import run_if
from fleet_train.convert.program.gradients import in_ready_order
from fleet_train.errors import ConversionError

Pairs = list[tuple[Any, Any]]


@dataclass(frozen=True)
class GradientMerge:
    """``accumulate_steps``: micro-batches per update, their gradients averaged. 1 = an update every step."""

    accumulate_steps: int = 1

    def __post_init__(self) -> None:
        if self.accumulate_steps < 1:
            raise ConversionError(f"accumulate_steps={self.accumulate_steps}: must be 1 micro-batch or more per update")


@dataclass(frozen=True)
class MergedGradients:
    """``pairs``: parameter and mean gradient of the micro-batches since the last update (of fewer, between updates).

    ``boundary``: bool, shape [1]: true in the step that ends with an update; on every rank in the same step. None
    when every step does.
    """

    pairs: Pairs
    boundary: Any
    buffers: tuple[Any, ...]

    def apply(self, update: Callable[[], Any]) -> Any:
        """Append ``update`` (which creates the optimizer's operators) to run at the boundary; returns its result."""
        if self.boundary is None:
            return update()

        def update_and_empty() -> Any:
            operators = update()
            for buffer in self.buffers:
                paddle.assign(paddle.zeros_like(buffer), buffer)
            return operators

        return run_if(self.boundary, update_and_empty)


def merge_gradients(params_grads: Sequence[tuple[Any, Any]], settings: GradientMerge) -> MergedGradients:
    """Append the sum over micro-batches after each gradient of the current program.

    The sums and the count of micro-batches are persistable: a checkpoint in the middle of an update continues it.
    The pairs keep their order; a parameter without a gradient keeps None.
    """
    if settings.accumulate_steps == 1:
        return MergedGradients(list(params_grads), None, ())
    ready = in_ready_order(params_grads)
    paddle.pir.set_insertion_point(ready[0].value.get_defining_op())
    boundary = _count_micro_batches(settings.accumulate_steps)
    means: dict[str, Any] = {}
    buffers = []
    for item in ready:
        paddle.pir.set_insertion_point_after(item.value.get_defining_op())
        buffer = _persistable_zeros(item.value.dtype, item.value.shape, f"{item.parameter.name}@gradient_merge")
        total = buffer + item.value
        paddle.assign(total, buffer)
        means[item.parameter.name] = total.scale(1.0 / settings.accumulate_steps)
        buffers.append(buffer)
    paddle.pir.reset_insertion_point_to_end()
    pairs = [(parameter, means.get(parameter.name)) for parameter, _ in params_grads]
    return MergedGradients(pairs, boundary, tuple(buffers))


def _count_micro_batches(accumulate_steps: int) -> Any:
    """Count this micro-batch; true for the last one of an update, after which the count starts again."""
    name = paddle.utils.unique_name.generate("gradient_merge_count")
    count = _persistable_zeros(paddle.int64, [1], name)
    with_this_one = count + 1
    boundary = with_this_one >= accumulate_steps
    paddle.assign(paddle.where(boundary, paddle.zeros_like(with_this_one), with_this_one), count)
    return boundary


def _persistable_zeros(dtype: Any, shape: Sequence[int], name: str) -> Any:
    zero = paddle.nn.initializer.Constant(0.0)
    return paddle.pir.core.create_persistable_value(dtype, list(shape), name, initializer=zero)
