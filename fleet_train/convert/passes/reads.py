"""What the operators of a program read and write: variables of the scope, and values that others change in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.collectives.host_ops import kind_of, passes_a_token
from fleet_train.convert.passes.program import (
    BATCH_NORMS,
    all_inputs_of,
    inputs_of,
    nested_operators,
    stored_by,
    variable_of,
)

_RATE = "learning_rate"
_WRITING_LINKS = ("share", "fill", "finish")


@dataclass(frozen=True)
class Access:
    """What an operator, with those in its sub-blocks, may read and may write: names of variables, and of values of the
    program, which begin with ``%``."""

    reads: frozenset[str]
    writes: frozenset[str]


def accesses(operators: Sequence[Any]) -> list[Access]:
    """Of each operator of a main block, in program order; without the token of a chain. The result of an operator in
    place, and of control flow, can be what it was given, and has the same names."""
    names: dict[int, frozenset[str]] = {}
    found = []
    for operator in operators:
        if (name := variable_of(operator)) is not None:
            names[operator.id()] = frozenset([name])
            found.append(Access(frozenset(), frozenset()))
            continue
        read = _names_of(all_inputs_of(operator)[passes_a_token(operator) :], names)
        written = _written(operator, names)
        found.append(Access(read, written))
        same = operator.name().endswith("_") or operator.name().startswith("builtin.") or operator.num_regions()
        names[operator.id()] = frozenset([f"%{operator.id()}"]) | (read if same else frozenset())
    return found


def is_fed(operator: Any) -> bool:
    """Whether an operator declares what a run is fed."""
    return operator.name() == "pd_op.feed" or (operator.name() == "pd_op.data" and not operator.result(0).persistable)


def learning_rates(operators: Sequence[Any]) -> frozenset[str]:
    """The variables that updates take as their learning rate: what a schedule sets before each run."""
    found = set()
    for operator in operators:
        for each in (operator, *nested_operators(operator)):
            for name, source in _named_inputs(each):
                maker = source.get_defining_op() if name == _RATE and _only_reads(each, name) else None
                if maker is not None and (variable := variable_of(maker)) is not None:
                    found.add(variable)
    return frozenset(found)


def _named_inputs(operator: Any) -> list[tuple[str, Any]]:
    """The inputs of one of Paddle's operators, with their names where Paddle has them; none of a host operator."""
    if not operator.name().startswith("pd_op."):
        return []
    sources = operator.operands_source()
    try:
        names = operator.get_input_names()
    except ValueError:  # control flow
        names = [""] * len(sources)
    return [(name, source) for name, source in zip(names, sources, strict=False) if source.initialized()]


def _only_reads(operator: Any, name: str) -> bool:
    """Whether an operator in place gives no new value to this input; Rprop has a learning rate for each value."""
    return f"{name}_out" not in operator.get_output_names()


def _names_of(values: Sequence[Any], names: dict[int, frozenset[str]]) -> frozenset[str]:
    makers = (value.get_defining_op() for value in values)
    return frozenset().union(*(names.get(maker.id(), frozenset()) for maker in makers if maker is not None))


def _written(operator: Any, names: dict[int, frozenset[str]]) -> frozenset[str]:
    if (stored := stored_by(operator)) is not None:
        return frozenset([stored])
    if passes_a_token(operator):
        return _names_of(inputs_of(operator), names) if kind_of(operator) in _WRITING_LINKS else frozenset()
    written: frozenset[str] = frozenset()
    for each in (operator, *nested_operators(operator)):
        if each.name() in BATCH_NORMS:
            written |= _names_of(each.operands_source()[1:3], names)
        elif each.name().endswith("_") and each.name().startswith("pd_op."):
            changed = [source for name, source in _named_inputs(each) if name != _RATE or not _only_reads(each, name)]
            written |= _names_of(changed, names)
        elif (stored := stored_by(each)) is not None:
            written |= {stored}
    return written
