"""Delays values until another value exists. Sends nothing; here because it is a host operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet_train.collectives.host_ops import _host_operator


def emit_hold(values: Sequence[Any], trigger: Any) -> list[Any]:
    """Insert an operator that passes ``values`` on once ``trigger`` has been computed.

    It copies them: an operator that Paddle runs in place on the output would overwrite the input.
    """

    def run(*tensors: Any) -> Any:
        copies = tuple(tensor.clone() for tensor in tensors[:-1])
        return copies if len(copies) > 1 else copies[0]

    outputs = [(value.shape, value.dtype) for value in values]
    results = _host_operator("hold", len(values) + 1, outputs, run)(*values, trigger)
    return list(results) if len(values) > 1 else [results]
