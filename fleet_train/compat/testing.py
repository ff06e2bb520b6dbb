"""``program.clone(for_test=True)``, which programs of today cannot do."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from paddle.base.libpaddle import pir

from fleet_train.convert import process
from fleet_train.errors import ConversionError

_VALUES = "_fleet_train_values"
# What learning adds to a program without taking a gradient: state that it stores, values that loops keep for it.
_OF_LEARNING = ("builtin.set_parameter", "builtin.shadow_output", "cf.")


def clone_for_test(program: Any) -> Any:
    """A copy of ``program`` that tests: dropout and batch norm in test mode, no gradients, the same parameters.

    As in Paddle 1.8, ``exe.run(copy, fetch_list=[loss])`` is given the values of ``program`` and fetches those of the
    copy. Operators that ``program`` gets later are not in the copy. Raises ConversionError where the learning
    operators cannot be told from the others: clone before ``minimize`` then.
    """
    values = _Values(program)
    for operator in _all_below(values.copy.global_block().ops):
        if operator.has_attr("is_test"):
            operator.set_bool_attr("is_test", True)
    setattr(values.copy, _VALUES, values)
    process.before_each_run(_translate_fetches)
    return values.copy


class _Values:
    """A program, its copy without learning operators, and which value became which."""

    def __init__(self, program: Any) -> None:
        self._program, self._mapping = program, pir.IrMapping()  # the mapping does not keep the program alive
        self.copy = program.clone(self._mapping)
        block, self._learning = self.copy.global_block(), set[int]()
        for operator in program.global_block().ops:
            if _learns(operator, self._learning):
                self._learning.add(operator.id())
        for old, new in reversed(list(zip(program.global_block().ops, block.ops, strict=True))):
            if old.id() in self._learning:
                block.remove_op(new)
        if self._learning and any(operator.name().startswith(_OF_LEARNING) for operator in block.ops):
            raise ConversionError(
                "clone_for_test: the program has control flow or stores values, of which it cannot be told what only "
                "training needs; clone it before minimize"
            )

    def translated(self, fetch_list: Any) -> Any:
        """``fetch_list`` with the copy's values. Raises ConversionError for one that the copy does not have."""
        if not isinstance(fetch_list, (list, tuple)):
            return self._translated(fetch_list, "fetch_list")
        return [self._translated(value, f"fetch_list[{index}]") for index, value in enumerate(fetch_list)]

    def _translated(self, value: Any, where: str) -> Any:
        if not isinstance(value, pir.Value) or value.get_defining_op().get_parent_block().program == self.copy:
            return value
        if not self._mapping.has(value) or value.get_defining_op().id() in self._learning:
            raise ConversionError(
                f"{where}: the test program does not have this value; it has what came before clone(for_test=True), "
                "without gradients: clone behind the operator that makes the value, and before minimize"
            )
        return self._mapping.look_up(value)


def _learns(operator: Any, learning: Collection[int]) -> bool:
    """Whether an operator computes a gradient, talks to other ranks, or takes what those in ``learning`` made."""
    return any(
        inner.name().endswith("_grad")
        or inner.name().startswith("py_op.fleet_train")
        or any(
            source.get_defining_op() is not None and source.get_defining_op().id() in learning
            for source in inner.operands_source()
        )
        for inner in _all_below([operator])
    )


def _all_below(operators: list[Any]) -> Iterator[Any]:
    """The operators and those of their blocks."""
    for operator in operators:
        yield operator
        for block in operator.blocks():
            yield from _all_below(block.ops)


def _translate_fetches(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
    """Before a run: fetch from a copy what the script knows as a value of the program.

    A fetched value of another program ends the process.
    """
    values = getattr(program, _VALUES, None)
    return feed, fetch_list if values is None or fetch_list is None else values.translated(fetch_list)
