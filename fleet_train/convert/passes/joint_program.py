"""A script's own program, as it was before its conversion, computing the gradients of a joint batch in one process.

What it draws at random is fed instead, so that one process has the values which the ranks have drawn; and a sum over
ranks that the script has put into its program is what one process has anyway: the value itself.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from fleet_train.convert.passes.joint_batch.analysis import Analysis
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.convert.passes.program import (
    changes_statistics,
    is_random,
    line_of,
    nested_operators,
    operators_behind,
)
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile

Array = NDArray[Any]

DRAWN = "fleet_train_drawn_"
"""How the marks of random values begin, which are also the names of the inputs that stand for them."""
_MARK = "fleet_train_marked"
"""An attribute of operators: the marks of their results."""
_SUMS = ("pd_op.all_reduce", "pd_op.c_allreduce_sum", "pd_op.mp_allreduce_sum")
_numbers = itertools.count()


def mark(value: Any, name: str) -> None:
    """Make ``value`` known by ``name``, also in copies of its program; several values may have one name."""
    operator = value.get_defining_op()
    operator.set_str_attr(_MARK, json.dumps([*_marks(operator), [value.index(), name]]))


def marked_in(program: Any) -> dict[str, list[Any]]:
    """The marked values of a program, by name."""
    found: dict[str, list[Any]] = {}
    for operator in program.global_block().ops:
        for index, name in _marks(operator):
            found.setdefault(name, []).append(operator.result(index))
    return found


def _marks(operator: Any) -> list[list[Any]]:
    return json.loads(operator.attrs()[_MARK]) if operator.has_attr(_MARK) else []


def _is_given(result: Any) -> bool:
    return bool(result.initialized())


class JointProgram:
    """A copy of the program of ``loss``, which nobody has changed yet. What both draw at random is marked."""

    def __init__(self, loss: Any, profile: Profile, place: Any) -> None:
        program = loss.block.program
        for operator in program.global_block().ops:
            if is_random(operator) and not operator.has_attr(_MARK):
                for result in filter(_is_given, operator.results()):
                    mark(result, f"{DRAWN}{next(_numbers)}")
        self._profile, self._place, self._own = profile, place, paddle.pir.IrMapping()
        self.program = program.clone(self._own)
        self._loss = self._own.look_up(loss)
        self._gradients: list[tuple[str, Any]] = []
        self.has_correction = False
        """Whether the script may correct its loss for the number of ranks: by a constant, a fed number or a sum."""

    def derive(self, trained: Any, untrained: Any, names: set[str], shares: int) -> None:
        """Compute the gradients of the parameters with these names, and nothing else; ``trained`` and ``untrained``:
        values, what the script's ``backward`` was given, or None.

        ``shares``: of how many gradients the average is taken. Raises ConversionError if one process cannot do it.
        """
        loss, own = self._loss, self._own
        with paddle.static.program_guard(self.program, paddle.static.Program()), paddle.utils.unique_name.guard():
            fed = [each.result(0).shape for each in self._operators if each.name() == "pd_op.data"]
            self.has_correction = any(math.prod(shape) == 1 for shape in fed) or any(map(_is_sum, self._operators))
            self.has_correction |= bool(Analysis(loss, shares, shares, {}, lambda _: True).found.assumed)
            self._feed_what_is_drawn()
            lower_precision(loss, self._profile, on_gpu=not isinstance(self._place, paddle.CPUPlace))
            parameters = None if trained is None else list(map(own.look_up, trained))
            left_out = {own.look_up(each) for each in untrained or ()} or None
            pairs = paddle.static.append_backward(loss, parameters, no_grad_set=left_out)
        self._gradients = [(parameter.name, value) for parameter, value in pairs if parameter.name in names]
        if missing := sorted(names - {name for name, _ in self._gradients}):
            raise ConversionError(f"one process has no gradient of '{missing[0]}'")
        behind = {each.id() for each in operators_behind(*(value for _, value in self._gradients))}
        for operator in reversed(list(self._operators)):
            if operator.id() not in behind:
                self.program.global_block().remove_op(operator)
        for operator in self._operators:
            _refuse(operator)

    @property
    def inputs(self) -> dict[str, list[int]]:
        """The shapes of what it is fed, by name."""
        values = [each.result(0) for each in self._operators if each.name() == "pd_op.data"]
        return {value.name: list(value.shape) for value in values}

    @property
    def variables(self) -> set[str]:
        """The names of the variables that it reads."""
        return {str(each.attrs()["parameter_name"]) for each in self._operators if each.name() == "builtin.parameter"}

    @property
    def has_low_precision(self) -> bool:
        """Whether something in it has 16 bits."""
        values = [value for each in self._operators for value in filter(_is_given, each.results())]
        return any(value.is_dense_tensor_type() and value.dtype in _LOW for value in values)

    @property
    def own_statistics(self) -> str:
        """The line of an operator that is a batch norm over the batch, or else its name; empty for none."""
        for norm in self._operators:
            if changes_statistics(norm):
                return line_of(norm) or "a batch norm"
        return ""

    def run(self, scope: Any, feed: Mapping[str, Array]) -> dict[str, Array]:
        """The gradients in float64. ``scope``: with all ``variables``, of which it changes batch norm's statistics."""
        executor, run = paddle.static.Executor(self._place), paddle.static.Executor.run
        while hasattr(run, "__wrapped__"):  # hooks of runs are for those of the script
            run = run.__wrapped__
        fetched = run(executor, self.program, dict(feed), [gradient for _, gradient in self._gradients], scope=scope)
        return summed(zip(self._gradients, fetched, strict=True))

    @property
    def _operators(self) -> list[Any]:
        return self.program.global_block().ops  # type: ignore[no-any-return]

    def _feed_what_is_drawn(self) -> None:
        for operator in list(self._operators):
            if _is_sum(operator):
                operator.result(0).replace_all_uses_with(operator.operand_source(0))
            is_dropout = operator.name() == "pd_op.dropout"
            drawn = [(operator.result(index), name) for index, name in _marks(operator)][is_dropout:]
            if not is_dropout and not all(result.stop_gradient for result, _ in drawn):
                continue
            paddle.pir.set_insertion_point(operator)
            for result, name in drawn:
                fed = paddle.static.data(name, list(result.shape), result.dtype)
                if is_dropout:
                    operator.result(0).replace_all_uses_with(_dropped(operator, fed))
                result.replace_all_uses_with(fed)
        paddle.pir.reset_insertion_point_to_end()


_LOW = (paddle.bfloat16, paddle.float16)


def _is_sum(operator: Any) -> bool:
    return operator.name().rstrip("_") in _SUMS


def _dropped(dropout: Any, mask: Any) -> Any:
    """What a dropout with this mask makes of its input."""
    x, rate = dropout.operand_source(0), dropout.operand_source(2)
    kept = paddle.multiply(x, paddle.cast(mask, x.dtype))
    if dropout.attrs()["mode"] != "upscale_in_train":
        return kept
    part = 1.0 - paddle.cast(rate, x.dtype)
    return kept / paddle.where(part > 0, part, paddle.ones_like(part))


def _refuse(operator: Any) -> None:
    """Raise ConversionError if one process cannot compute an operator as the ranks do."""
    name = operator.name()
    drawing = [each for each in (operator, *nested_operators(operator)) if is_random(each)]
    if "fleet_train_" in name or (operator.has_attr("ring_id") and not drawing):
        raise ConversionError(f"{name} exchanges values with other ranks")
    if drawing:
        place = line_of(drawing[0]) or drawing[0].name()
        raise ConversionError(f"{place}: what is drawn at random there (a branch, a loop, a recurrent layer) is unseen")


def summed(fetched: Iterable[tuple[tuple[str, Any], Any]]) -> dict[str, Array]:
    """The float64 sums of what was fetched, by name: of a parameter that is used in several places, one gradient."""
    sums: dict[str, Array] = {}
    for (name, value), got in fetched:
        array = np.asarray(got)
        if value.dtype == paddle.bfloat16:  # of which numpy has the bits, as integers
            array = (array.astype(np.uint32) << 16).view(np.float32)
        sums[name] = sums[name] + array if name in sums else array.astype(np.float64)
    return sums
