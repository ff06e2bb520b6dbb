"""Where a program computes its gradients, and the order in which the backward pass finishes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.errors import ConversionError
from fleet_train.plan import TensorSpec


@dataclass(frozen=True)
class ReadyGradient:
    """A parameter, its gradient's value, and where in the block that value is made."""

    parameter: Any
    value: Any
    position: int

    @property
    def gradient(self) -> TensorSpec:
        return TensorSpec(
            self.parameter.name, tuple(int(size) for size in self.value.shape), dtype_name(self.value.dtype)
        )


def summed_over_uses(params_grads: Sequence[tuple[Any, Any]]) -> tuple[list[tuple[Any, Any]], list[str]]:
    """One pair per parameter, in the order of first appearance, and the names of those that had several.

    PIR makes a value for each use of a name (``ParamAttr(name="w")`` in two places), so ``backward`` gives a gradient
    for each. Their sum is the gradient of the parameter; Paddle 3.3.1 alone updates once per use, which is the same
    for plain SGD only.
    """
    uses: dict[str, list[tuple[Any, Any]]] = {}
    for parameter, value in params_grads:
        uses.setdefault(parameter.name, []).append((parameter, value))
    several = [name for name, pairs in uses.items() if len(pairs) > 1]
    return [(pairs[0][0], _sum(pairs)) for pairs in uses.values()], several


def _sum(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Appended after the last of the values; a single value unchanged, None for no value."""
    values = [value for _, value in pairs if value is not None]
    if len(values) < 2:
        return values[0] if values else None
    positions = positions_of(values[0])
    last = max(
        (_locate(parameter, value, positions) for parameter, value in pairs if value is not None),
        key=lambda item: item.position,
    )
    paddle.pir.set_insertion_point_after(last.value.get_defining_op())
    total = paddle.add_n(values)
    paddle.pir.reset_insertion_point_to_end()
    return total


def uses_a_name_twice(program: Any) -> bool:
    """Whether ``program`` has several values for one parameter."""
    names = [op.attrs()["parameter_name"] for op in program.global_block().ops if op.name() == "builtin.parameter"]
    return len(set(names)) < len(names)


def positions_of(value: Any) -> dict[int, int]:
    """The position of each operator in the block that makes ``value``, by its id."""
    return {op.id(): position for position, op in enumerate(value.get_defining_op().get_parent_block().ops)}


def in_ready_order(params_grads: Sequence[tuple[Any, Any]]) -> list[ReadyGradient]:
    """The gradients by the position of the operator that makes each; parameters without a gradient are left out.

    Raises ConversionError for gradients that cannot be averaged as dense tensors.
    """
    present = [(parameter, value) for parameter, value in params_grads if value is not None]
    if not present:
        raise ConversionError("no parameter has a gradient: does the loss depend on a parameter that is not frozen?")
    positions = positions_of(present[0][1])
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
            f"the gradient of '{parameter.name}' is computed inside a control-flow block; compute the loss in the "
            "main block"
        )
    return ReadyGradient(parameter, value, position)


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``paddle.float32``."""
    return str(dtype).rsplit(".", 1)[-1]
