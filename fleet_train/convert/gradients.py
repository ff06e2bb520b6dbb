"""Where gradients come into being in a program, and the order in which the backward pass finishes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.errors import ConversionError
from fleet_train.plan import Gradient


@dataclass(frozen=True)
class ReadyGradient:
    """A parameter, its gradient's value, and where in the block that value is made."""

    parameter: Any
    value: Any
    position: int

    @property
    def gradient(self) -> Gradient:
        return Gradient(
            self.parameter.name, tuple(int(size) for size in self.value.shape), dtype_name(self.value.dtype)
        )


def in_ready_order(params_grads: Sequence[tuple[Any, Any]]) -> list[ReadyGradient]:
    """The gradients by the position of the operator that makes each; parameters without a gradient are left out.

    Raises ConversionError for gradients that cannot be averaged as dense tensors.
    """
    present = [(parameter, value) for parameter, value in params_grads if value is not None]
    if not present:
        raise ConversionError("no parameter has a gradient: does the loss depend on a parameter that is not frozen?")
    block = present[0][1].get_defining_op().get_parent_block()
    positions = {operator.id(): position for position, operator in enumerate(block.ops)}
    ready = [_locate(parameter, value, positions) for parameter, value in present]
    return sorted(ready, key=lambda item: (item.position, item.parameter.name))


def _locate(parameter: Any, value: Any, positions: dict[int, int]) -> ReadyGradient:
    if not value.is_dense_tensor_type():
        raise ConversionError(
            f"the gradient of '{parameter.name}' is sparse (selected rows); build its layer with sparse=False, so that "
            "it can be averaged over the ranks"
        )
    if any(size < 0 for size in value.shape):
        raise ConversionError(f"the gradient of '{parameter.name}' has the unknown shape {list(value.shape)}")
    position = positions.get(value.get_defining_op().id())
    if position is None:
        raise ConversionError(
            f"the gradient of '{parameter.name}' is made inside a control-flow block; make the loss in the main block"
        )
    return ReadyGradient(parameter, value, position)


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``paddle.float32``."""
    return str(dtype).rsplit(".", 1)[-1]
