"""Traversal of a program's block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


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
        users = [operator, *(nested_operators(operator) if operator.num_regions() else ())]
        waiting += [source for user in users for source in inputs_of(user)]
    block = value.get_defining_op().get_parent_block()
    return [operator for operator in block.ops if operator.id() in found]


def inputs_of(operator: Any) -> list[Any]:
    """The given operands: an optional one that is missing (dropout's seed) is an empty value."""
    return [source for source in operator.operands_source() if source.initialized()]
