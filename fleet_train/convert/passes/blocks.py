"""Traversal of a program's block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle


def nested_operators(operator: Any) -> Iterator[Any]:
    """The operators in the sub-blocks of a control-flow operator, at every depth."""
    for block in operator.blocks():
        for inner in block.ops:
            yield inner
            if inner.num_regions():
                yield from nested_operators(inner)


def operators_behind(value: Any) -> list[Any]:
    """The operators of the main block that ``value`` depends on, in program order.

    Operators in sub-blocks are left out; what they read from the main block is not.
    """
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        operator = waiting.pop().get_defining_op()
        if operator is None or operator.id() in found:
            continue
        found[operator.id()] = operator
        waiting += all_inputs_of(operator)
    block = value.get_defining_op().get_parent_block()
    return [operator for operator in block.ops if operator.id() in found]


def inputs_of(operator: Any) -> list[Any]:
    """The given operands: an optional one that is missing (dropout's seed) is an empty value."""
    return [source for source in operator.operands_source() if source.initialized()]


def all_inputs_of(operator: Any) -> list[Any]:
    """Those of ``operator`` and of the operators in its sub-blocks."""
    users = [operator, *(nested_operators(operator) if operator.num_regions() else ())]
    return [source for user in users for source in inputs_of(user)]


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
