"""The global norm of the gradient that an optimizer uses: operators inserted into a finished program on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.convert.program.gradients import dtype_name, positions_of
from fleet_train.errors import ConversionError

_SQUARES = "pd_op.squared_l2_norm"


@dataclass(frozen=True)
class UpdatedGradients:
    """``pairs``: parameter and gradient of one update, averaged over the ranks and micro-batches, before clipping.

    ``boundary``: bool [1], true in the runs that end with an update; None = all do. ``scale``: float32 [1], the loss
    scale still in the gradients; None = no scale.
    """

    program: Any
    pairs: Sequence[tuple[Any, Any]]
    boundary: Any = None
    scale: Any = None


def insert_gradient_norm(updated: UpdatedGradients) -> Any:
    """Insert operators that compute the L2 norm over all gradients; returns its value, float32, one element.

    Each gradient's squares are summed right after the operator that makes it, so no wait moves forward. If the update
    sums them itself in every step (``ClipGradByGlobalNorm``), its sum is used. In a run without an update the value is
    0.
    """
    gradients = [_dense(parameter, value) for parameter, value in updated.pairs if value is not None]
    with paddle.static.program_guard(updated.program, paddle.static.Program()):
        if updated.boundary is None:
            squares = [_sum_of_squares(gradient) for gradient in gradients]
            _go_behind(squares)
            norm = _norm(squares, updated.scale)
        else:
            _go_behind([*gradients, updated.boundary])
            norm = paddle.static.nn.cond(
                updated.boundary.reshape([]),
                lambda: _norm([_squares(gradient) for gradient in gradients], updated.scale),
                lambda: paddle.full([1], 0.0, "float32"),
            )
        paddle.pir.reset_insertion_point_to_end()
    return norm


def _dense(parameter: Any, value: Any) -> Any:
    if not value.is_dense_tensor_type():
        raise ConversionError(
            f"the gradient of '{parameter.name}' is sparse (selected rows), and its norm is not computed; build its "
            "layer with sparse=False, or train without the norm of the gradient"
        )
    return value


def _sum_of_squares(gradient: Any) -> Any:
    """The clip's sum, if it is in the main block: one in a conditional block does not exist in every step."""
    block = gradient.get_defining_op().get_parent_block()
    for user in gradient.all_used_ops():
        if user.name() == _SQUARES and user.get_parent_block() == block:
            return user.result(0)
    paddle.pir.set_insertion_point_after(gradient.get_defining_op())
    return _squares(gradient)


def _squares(gradient: Any) -> Any:
    is_low = dtype_name(gradient.dtype) in ("float16", "bfloat16")
    return _C_ops.squared_l2_norm(gradient.astype("float32") if is_low else gradient)


def _norm(squares: Sequence[Any], scale: Any) -> Any:
    """Each of ``squares`` has one element; uses few operators, because there may be hundreds of small gradients."""
    parts = [each if each.dtype == paddle.float32 else each.astype("float32") for each in squares]
    norm = paddle.sqrt(paddle.stack(parts).sum()).reshape([1])
    return norm if scale is None else norm / scale.reshape([1])


def _go_behind(values: Sequence[Any]) -> None:
    """Move the insertion point after the last of the operators that make ``values``."""
    positions = positions_of(values[0])
    operators = [value.get_defining_op() for value in values]
    paddle.pir.set_insertion_point_after(max(operators, key=lambda operator: positions[operator.id()]))
