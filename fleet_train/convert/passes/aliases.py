"""Names that share memory, which Paddle's in-place pass and its gradients of branches do not follow.

The pass lets an operator write over an operand that nothing reads later, by that name. Other names of the same memory
(``detach()``, what a branch or a ``static_pylayer`` returns as it got it, what oneDNN hands over in its own layout)
are then overwritten before they are read: gradients that are wrong by more than their size, and no error. Without the
pass a step needs at most one tensor more at a time, and computes the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import paddle

from fleet_train.convert import process
from fleet_train.convert.passes.program import line_of, nested_operators, operators_behind
from fleet_train.errors import ConversionError

FLAG = "FLAGS_pir_apply_inplace_pass"
_TRUE = ("1", "true", "t", "yes", "y", "on")


def keep_shared_memory(environment: Mapping[str, str]) -> list[str]:
    """Switch Paddle's in-place pass off for all programs that run from now on; returns a note if it was asked for.

    ``environment``: that of the profile.
    """
    process.set_flags({FLAG: False})
    asked = environment.get(FLAG, os.environ.get(FLAG, ""))
    if asked.lower() not in _TRUE:
        return []
    return [f"{FLAG}: switched off, because that pass overwrites values that are still read by another name"]


def separate_results_of_branches(program: Any) -> int:
    """Copy what a branch (``cond``, ``case``, ``switch_case``) returns without having made it, or twice; returns how
    many copies there are.

    Call it before gradients are derived: Paddle 3.3.1 loses a part of the gradient of a value that is such a result and
    is read elsewhere, too.
    """
    before = paddle.pir.get_current_insertion_point()
    block, count = program.global_block(), 0
    for operator in chain(list(block.ops), *map(nested_operators, list(block.ops))):
        if operator.name() == "pd_op.if":
            count += sum(map(_separate_results, operator.blocks()))
    if count:
        paddle.pir.set_insertion_point(before)
    return count


def settle_assignments(loss: Any) -> None:
    """Make what ``x = paddle.static.setitem(x, index, value)`` overwrites a copy, so that ``x`` is there for gradients.

    Call it before gradients are derived. Raises ConversionError where Paddle 3.3.1's gradient is wrong, or the program
    reads ``x`` by its old name.
    """
    before = paddle.pir.get_current_insertion_point()
    behind = {operator.id() for operator in operators_behind(loss)}
    operators = list(loss.get_defining_op().get_parent_block().ops)
    for position, operator in enumerate(operators):
        source = operator.operand_source(0) if operator.name() in _ASSIGNMENTS else None
        if source is None or source.stop_gradient or _is_copy(source):
            continue
        later = {each.id() for each in operators[position + 1 :]} & {each.id() for each in source.all_used_ops()}
        if later and (operator.id() in behind or later & behind):
            raise ConversionError(_assigned(operator, "reads x by its old name after it"))
        if operator.id() in behind and operator.name() == "pd_op.set_value_":
            raise ConversionError(_assigned(operator, "gives what is overwritten a gradient if value is a number"))
        if not later:
            paddle.pir.set_insertion_point(operator)
            operator.operand(0).set_source(paddle.assign(source))
    paddle.pir.set_insertion_point(before)


_ASSIGNMENTS = ("pd_op.set_value_", "pd_op.set_value_with_tensor_")


def _is_copy(value: Any) -> bool:
    maker = value.get_defining_op()
    return maker is not None and maker.name() == "pd_op.assign" and len(value.all_used_ops()) == 1


def _assigned(operator: Any, wrong: str) -> str:
    return (
        f"{line_of(operator) or 'an assignment to a part of a value'}: x[index] = value {wrong}, so gradients would be "
        "wrong; write x = paddle.static.setitem(x, index, paddle.full([1], number)), or a tensor for value, and read "
        "only the new x"
    )


def _separate_results(branch: Any) -> int:
    if not branch.ops or branch.ops[-1].name() != "cf.yield":
        return 0
    result, inside = branch.ops[-1], {operator.id() for operator in branch.ops}
    count, seen = 0, set[int]()
    for index, source in enumerate(result.operands_source()):
        maker = source.get_defining_op() if source.initialized() else None
        if maker is None or not source.is_dense_tensor_type():
            continue
        if maker.id() not in inside or source.id in seen:
            paddle.pir.set_insertion_point(result)
            result.operand(index).set_source(paddle.assign(source))
            count += 1
        seen.add(source.id)
    return count
