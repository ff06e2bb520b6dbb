"""Arithmetic with the arguments of ``paddle.fluid.layers`` 1.8: ``axis`` says where the second shape begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import paddle

from fleet_train.compat.activation import activated


def _along(y: Any, x: Any, axis: int) -> Any:
    """``y`` with ones behind its shape, so that it begins at ``axis`` of ``x``; -1: it ends where ``x`` ends."""
    behind = 0 if axis == -1 else len(x.shape) - axis - len(y.shape)
    if behind <= 0:
        return y
    return paddle.unsqueeze(y, axis=list(range(len(y.shape), len(y.shape) + behind)))


def _operation(name: str, function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def elementwise(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
        del name
        return activated(function(x, _along(y, x, axis)), act)

    elementwise.__name__ = elementwise.__qualname__ = f"elementwise_{name}"
    elementwise.__doc__ = (
        f"``{name}`` of two values of one dtype; the shape of ``y`` is that of ``x`` from ``axis`` on."
    )
    return elementwise


elementwise_add = _operation("add", paddle.add)
elementwise_sub = _operation("sub", paddle.subtract)
elementwise_mul = _operation("mul", paddle.multiply)
elementwise_div = _operation("div", paddle.divide)
elementwise_max = _operation("max", paddle.maximum)
elementwise_min = _operation("min", paddle.minimum)
elementwise_pow = _operation("pow", paddle.pow)


def flatten(x: Any, axis: int = 1, name: str | None = None) -> Any:
    """Two dimensions: the first ``axis`` of ``x`` as one, the others as one."""
    del name
    if axis == 0:
        return paddle.reshape(x, [1, -1])
    inner = [int(size) for size in x.shape[axis:]]
    return paddle.reshape(x, [-1, math.prod(inner)]) if -1 not in inner else _flatten_open(x, axis)


def _flatten_open(x: Any, axis: int) -> Any:
    front = x if axis == 1 else paddle.flatten(x, 0, axis - 1)
    return front if len(front.shape) == 2 else paddle.flatten(front, 1)


def mul(x: Any, y: Any, x_num_col_dims: int = 1, y_num_col_dims: int = 1, name: str | None = None) -> Any:
    """Matrix product of ``x`` and ``y``, each flattened to a matrix; the result has the outer dimensions of both."""
    del name
    outer_x = [int(size) for size in x.shape[:x_num_col_dims]]
    outer_y = [int(size) for size in y.shape[y_num_col_dims:]]
    product = paddle.matmul(flatten(x, x_num_col_dims), flatten(y, y_num_col_dims))
    if len(outer_x) == len(outer_y) == 1:
        return product
    return paddle.reshape(product, [*outer_x, *outer_y])


def cos_sim(X: Any, Y: Any) -> Any:
    """Cosine of the angle between the rows of ``X`` and those of ``Y`` (or its one row), as a column [rows, 1]."""
    x, y = flatten(X), flatten(Y)

    def over_rows(value: Any) -> Any:
        return paddle.sum(value, axis=1, keepdim=True)

    return over_rows(x * y) / (paddle.sqrt(over_rows(x * x)) * paddle.sqrt(over_rows(y * y)))
