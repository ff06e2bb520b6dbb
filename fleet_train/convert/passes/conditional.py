"""A part of the program that runs only in some steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from fleet_train.convert.passes.walk import nested_operators

# Operators that read a scope variable by name: accumulators, the learning rate, gradient merge's buffers.
_READS_SCOPE = ("builtin.parameter", "pd_op.data")


def run_if(predicate: Any, action: Callable[[], Any]) -> Any:
    """Append operators made by ``action`` that run when ``predicate`` (bool, one element) is true.

    Returns what ``action`` returned. Nothing in it may communicate: collectives in a sub-block are not ordered against
    those of the main block.
    """
    returned: list[Any] = []

    def branch() -> None:
        returned.append(action())

    paddle.static.nn.cond(predicate.reshape([]), branch, None)
    block = paddle.pir.get_current_insertion_point().block()
    _hoist_scope_reads([op for op in block.ops if op.name() == "pd_op.if"][-1])
    return returned[0]


def _hoist_scope_reads(conditional: Any) -> None:
    """Move the declarations of persistable values out of the sub-block.

    An optimizer creates its accumulators where it is applied. ``Program.state_dict`` does not see them inside the
    sub-block: they would be missing from checkpoints and from the broadcast of the start state.
    """
    for operator in list(nested_operators(conditional)):
        if operator.name() in _READS_SCOPE:
            operator.move_before(conditional)
