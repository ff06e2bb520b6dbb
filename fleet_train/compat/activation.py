"""``act="relu"``: the activation that layers of Paddle 1.x could bring along."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
from paddle.nn import functional

from fleet_train.errors import ConversionError

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "elu": functional.elu,
    "exp": paddle.exp,
    "gelu": functional.gelu,
    "hard_sigmoid": partial(functional.hardsigmoid, slope=0.2),
    "hard_swish": functional.hardswish,
    "leaky_relu": partial(functional.leaky_relu, negative_slope=0.02),
    "logsigmoid": functional.log_sigmoid,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "sigmoid": functional.sigmoid,
    "softmax": functional.softmax,
    "softplus": functional.softplus,
    "softsign": functional.softsign,
    "sqrt": paddle.sqrt,
    "square": paddle.square,
    "swish": functional.swish,
    "tanh": paddle.tanh,
}


def activated(value: Any, act: str | None) -> Any:
    """``act`` applied to ``value``; None: the value itself. Raises ConversionError for a name that is not known."""
    if act is None:
        return value
    if act not in ACTIVATIONS:
        raise ConversionError(f"act={act!r}: not supported; use one of {', '.join(sorted(ACTIVATIONS))}, or apply it")
    return ACTIVATIONS[act](value)
