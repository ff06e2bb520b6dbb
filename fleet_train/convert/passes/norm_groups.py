"""Which batch norms of a program can share an exchange without moving any other operator.

In the forward pass an exchange waits for the last of its norms, if no operator reads the others' results before; in the
backward pass it is placed at the first of its norms, if the others' inputs already exist. In a residual network these
are the norm of a shortcut and the last norm of the parallel branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet_train.convert.passes.walk import inputs_of, nested_operators


def groups_of_forward(operators: Sequence[Any], norms: Sequence[Any]) -> list[list[Any]]:
    """``norms``, batch norms among ``operators`` of the main block in their order, by the exchange that they share."""
    chosen = {operator.id() for operator in norms}
    groups: list[list[Any]] = []
    waiting: set[int] = set()
    for operator in operators:
        if waiting.intersection(source.id for source in _all_inputs(operator)):
            waiting.clear()
        if operator.id() in chosen:
            if not waiting or not _alike(groups[-1][0], operator):
                groups.append([])
                waiting.clear()
            groups[-1].append(operator)
            waiting.add(operator.result(0).id)
    return groups


def groups_of_backward(operators: Sequence[Any], norms: Sequence[Any]) -> list[list[Any]]:
    """The same for gradient operators."""
    position = {operator.id(): number for number, operator in enumerate(operators)}
    groups: list[list[Any]] = []
    for operator in norms:
        before = max(position[source.get_defining_op().id()] for source in inputs_of(operator))
        if groups and before < position[groups[-1][0].id()] and _alike(groups[-1][0], operator):
            groups[-1].append(operator)
        else:
            groups.append([operator])
    return groups


def _alike(one: Any, other: Any) -> bool:
    """An exchange has one dtype."""
    return bool(one.operand_source(0).dtype == other.operand_source(0).dtype)


def _all_inputs(operator: Any) -> list[Any]:
    users = [operator, *(nested_operators(operator) if operator.num_regions() else ())]
    return [source for user in users for source in inputs_of(user)]
