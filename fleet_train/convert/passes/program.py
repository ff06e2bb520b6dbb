"""What passes and the conversion read in a program: operators, what they depend on, updates without communication; and
what is appended under a condition."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import FrameType
from typing import Any

import paddle

import fleet_train
from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.host_ops import is_link

BATCH_NORMS = ("pd_op.batch_norm_", "pd_op.sync_batch_norm_")
"""Batch norms that update running statistics: a mean and a variance, their second and third operand."""

_RANDOM = frozenset(
    f"pd_op.{name}"
    for name in (
        *("bernoulli", "binomial", "dirichlet", "exponential_", "gumbel_softmax", "multinomial", "poisson"),
        *("randint", "randperm", "rrelu", "standard_gamma"),
    )
)
"""Random operators without an attribute "seed"."""


def draws(operator: Any) -> bool:
    """Whether an operator can draw at random."""
    return operator.name() in _RANDOM or operator.has_attr("seed") or operator.has_attr("rng_name")


def is_random(operator: Any) -> bool:
    """Whether an operator draws at random with its settings, in training."""
    if not draws(operator):
        return False
    rates = [operator.attrs()[name] for name in ("dropout_prob", "dropout") if operator.has_attr(name)]
    is_test = operator.has_attr("is_test") and operator.attrs()["is_test"]
    return not is_test and (not rates or any(rates))


def nested_operators(operator: Any) -> Iterator[Any]:
    """The operators in the sub-blocks of a control-flow operator, at every depth."""
    for block in operator.blocks():
        for inner in block.ops:
            yield inner
            if inner.num_regions():
                yield from nested_operators(inner)


def operators_behind(value: Any, *others: Any) -> list[Any]:
    """The operators of the main block that ``value`` and ``others`` depend on, in program order.

    Operators in sub-blocks are left out; what they read from the main block is not.
    """
    behind: set[int] = set()
    waiting = [value, *others]
    while waiting:
        operator = waiting.pop().get_defining_op()
        if operator is None or operator.id() in behind:
            continue
        behind.add(operator.id())
        waiting += all_inputs_of(operator)
    block = value.get_defining_op().get_parent_block()
    return [operator for operator in block.ops if operator.id() in behind]


def parameters_behind(value: Any) -> set[str]:
    """The names of the parameters and statistics that ``value`` depends on."""
    makers = operators_behind(value) if value.get_defining_op() is not None else []
    return {str(maker.attrs()["parameter_name"]) for maker in makers if maker.name() == "builtin.parameter"}


def inputs_of(operator: Any) -> list[Any]:
    """The given operands: an optional one that is missing (dropout's seed) is an empty value."""
    return [source for source in operator.operands_source() if source.initialized()]


def all_inputs_of(operator: Any) -> list[Any]:
    """The inputs of ``operator`` and of the operators in its sub-blocks."""
    users = [operator, *(nested_operators(operator) if operator.num_regions() else ())]
    return [source for user in users for source in inputs_of(user)]


_DECLARES = ("builtin.parameter", "pd_op.data")
_STORES = {"builtin.set_parameter": "parameter_name", "builtin.shadow_output": "output_name"}


def variable_of(operator: Any) -> str | None:
    """The variable that an operator declares, by its name: a parameter, an accumulator, the learning rate, gradient
    merge's buffers; also what is fed. None for another operator."""
    if operator.name() not in _DECLARES:
        return None
    attributes = operator.attrs()
    return str(attributes.get("parameter_name") or attributes.get("name"))


def stored_by(operator: Any) -> str | None:
    """The variable that an operator stores a value into, by its name; None for another operator."""
    attribute = _STORES.get(operator.name())
    return None if attribute is None else str(operator.attrs()[attribute])


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
        if variable_of(operator) is not None:
            operator.move_before(conditional)


def persistable(name: str, dtype: Any, shape: Sequence[int] = (1,), value: float = 0.0) -> Any:
    """A variable of the current program that starts with ``value``: a checkpoint holds it."""
    start = paddle.nn.initializer.Constant(float(value))
    return paddle.pir.core.create_persistable_value(dtype, list(shape), name, initializer=start)


def changes_statistics(operator: Any) -> bool:
    """Whether an operator is a batch norm that takes the statistics of its batch, and keeps their running mean."""
    attributes = operator.attrs() if operator.name() in BATCH_NORMS else {"is_test": True}
    return not (attributes.get("use_global_stats") or attributes.get("is_test"))


def held_values(program: Any, trained: Sequence[Any]) -> HeldValues:
    """The values of ``program`` that LocalSGD and the divergence sentinel read."""
    statistics = {}
    for operator in program.global_block().ops:
        if operator.name() in BATCH_NORMS:
            for source in operator.operands_source()[1:3]:
                if source.get_defining_op().name() == "builtin.parameter":  # not those of all ranks, of a step
                    statistics[source.get_defining_op().id()] = source
    return HeldValues(list(trained), list(statistics.values()), [])


_FRAME = re.compile(r'File "(.+)", line (\d+)')
_LIBRARIES = (paddle.__file__, fleet_train.__file__, os.__file__)
_NOT_THE_SCRIPT = (*(os.path.dirname(str(file)) + os.sep for file in _LIBRARIES), "<frozen", "<decorator")


def script_line() -> str:
    """The script's line that is running, such as ``train.py, line 12``: outside of Paddle, Python and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}" if frame else "the script"


def updates_alone(program: Any, converted: set[str]) -> str:
    """The place where a program updates parameters without the other ranks, in words for a message; empty if nowhere.

    ``converted``: the parameters that this process's converted programs update.
    """
    block = program.global_block().ops
    together = {*converted, ""} if any(map(is_link, block)) else set()
    for operator in chain(block, *map(nested_operators, block)):
        if _updates(operator) and (name := _parameter(operator)) not in together:
            return line_of(operator) or f"the program with parameter '{name}'"
    return ""


def _updates(operator: Any) -> bool:
    """Whether an operator changes a parameter in place by a gradient; only Paddle's own can name their operands."""
    name = operator.name()
    return name.startswith("pd_op.") and name.endswith("_") and set(operator.get_input_names()) >= {"param", "grad"}


def _parameter(update: Any) -> str:
    value = update.operand_source(update.get_input_names().index("param"))
    return str(value.get_defining_op().attrs().get("parameter_name", ""))


def line_of(operator: Any) -> str:
    """The script's line that made an operator, such as ``train.py, line 12 (optimizer.minimize(loss))``."""
    try:
        stack = [str(line).strip() for line in operator.attrs().get("op_callstack") or ()]
    except NotImplementedError:  # Paddle cannot read the attributes of a host operator
        return ""
    place = ""
    for index, line in enumerate(stack):
        frame = _FRAME.match(line)
        if frame is not None and not frame[1].startswith(_NOT_THE_SCRIPT):
            code = "".join(f" ({text[:80]})" for text in stack[index + 1 : index + 2] if not _FRAME.match(text))
            place = f"{os.path.basename(frame[1])}, line {frame[2]}{code}"
    return place
