"""The counts of a loss, which no parameter changes: they are computed and sent before the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import paddle

from fleet_train.collectives.joint_values import JointValues
from fleet_train.convert.passes.exchanged import mean_over_ranks
from fleet_train.convert.passes.joint_batch.analysis import Analysis
from fleet_train.convert.passes.joint_batch.axes import SampleCount, key_of
from fleet_train.convert.passes.joint_batch.kinds import Operand, is_float, short
from fleet_train.convert.passes.program import draws, operators_behind

_DECLARES = ("pd_op.data", "builtin.parameter", "pd_op.full", "pd_op.full_int_array", "builtin.constant")


class Counts:
    """The counts of one loss: what is to be divided by is their mean over ranks."""

    def __init__(
        self, analysis: Analysis, values: JointValues, known: Collection[tuple[int, bool, bool]], *, is_merged: bool
    ) -> None:
        """``known``: values that are joined already. ``is_merged``: with other micro-batches, where what is 0 here may
        not be; it is read as 1."""
        self._analysis, self._values, self._known, self._is_merged = analysis, values, known, is_merged
        self._what = f"counts of the batch, {len(values.exchanges)}"
        self._numbers: dict[tuple[Any, ...], Any] = {}
        self._sent: dict[int, Any] = {}
        self._raw: dict[int, Any] = {}

    def start(self) -> None:
        """Insert what computes the counts, ahead of everything else, and what starts their exchange."""
        found = self._analysis.found
        joined = {use.operand.value.id: use.operand.value for use in found.uses if use.is_joined and not use.learned}
        joined = {
            name: value
            for name, value in joined.items()
            if not any((name, False, divides) in self._known for divides in (False, True))
        }
        products = {key_of(roots): roots for roots in found.means.values()}
        needed = [value for roots in products.values() for root in roots for value in _read_by(root)]
        movable = {value.id for value in (*joined.values(), *needed) if self._moves(value)}
        anchor = self._move_ahead([value for value in (*joined.values(), *needed) if value.id in movable])
        paddle.pir.set_insertion_point(anchor)
        for key, roots in products.items():
            if all(value.id in movable for root in roots for value in _read_by(root)):
                self._numbers[key] = number = _product(roots)
                self._sent[number.id] = number
        for name, value in joined.items():
            if name in movable:
                self._sent[name] = value if is_float(value) else value.cast("float64")
        if self._analysis.ranks == 1:
            self._sent.clear()
        if self._sent:
            self._values.start_means(self._what, list(self._sent.values()))

    def number(self, roots: Sequence[SampleCount]) -> Any:
        """The product of these numbers on this rank: a value of the program, float64 [], of the current place."""
        key = key_of(roots)
        if key not in self._numbers:
            self._numbers[key] = _product(roots)
        return self._numbers[key]

    def mean(self, name: Any, value: Any, *, divides: bool = False) -> Any:
        """The mean over ranks of a count; ``value``: what is read in its place now. ``divides``: what is divided by it
        is 0 where it is."""
        if name.id not in self._raw:
            if name.id in self._sent:
                means = self._values.means(self._what, list(self._sent.values()))
            else:
                own = value if is_float(value) else value.cast("float64")
                means = [own if self._analysis.ranks == 1 else mean_over_ranks(own)]
            for each, mean in zip(self._sent if name.id in self._sent else [name.id], means, strict=True):
                mean.stop_gradient = True
                self._raw[each] = mean
        mean = self._raw[name.id]
        return self._not_zero(mean) if divides and self._is_merged else mean

    def _not_zero(self, mean: Any) -> Any:
        mean = paddle.where(mean == 0, paddle.ones_like(mean), mean)
        mean.stop_gradient = True
        return mean

    def single(self, current: Callable[[Any], Any]) -> tuple[Any, bool]:
        """The count by which micro-batches are weighted, float64 [], inserted at the current place, and whether the
        loss guards itself against 0. (None, False) if there is none, or one micro-batch. ``current``: what is read in
        place of a value."""
        found = self._analysis.found
        if not self._is_merged or found.several or not found.divisors:
            return None, False
        weight: Any = None
        is_guarded = False
        for divisor in found.divisors:
            if isinstance(divisor, Operand):
                raw = self._unguarded(divisor.value)
                is_guarded |= raw is not divisor.value
                value = self._joint(raw, current)
            else:
                number = self.number(divisor)
                self.mean(number, number)
                value = self._raw[number.id]
            weight = value if weight is None else weight * value
        weight.stop_gradient = True
        return weight, is_guarded

    def _joint(self, value: Any, current: Callable[[Any], Any]) -> Any:
        if self._analysis.kind(value).own or value.id in self._sent:
            self.mean(value, current(value))
            value = self._raw[value.id]
        return current(value).cast("float64").reshape([])

    def _unguarded(self, value: Any) -> Any:
        """The count that a divisor is at least 1, or another small constant, instead of."""
        maker = value.get_defining_op()
        if maker is None or value.id in self._sent:
            return value
        kinds = [(each, self._analysis.kind(each)) for each in maker.operands_source()]
        name, counts = short(maker), [each for each, kind in kinds if kind.is_of_feed]
        if name == "add":
            counts = [each for each, kind in kinds if kind.own]
            return (
                self._unguarded(counts[0]) if len(counts) == 1 and all(kind.is_of_feed for _, kind in kinds) else value
            )
        if name in ("cast", "reshape", "clip", "maximum", "fmax") and len(counts) == 1:
            return self._unguarded(counts[0])
        return value

    def _moves(self, value: Any) -> bool:
        """Whether everything that computes ``value`` may run before the rest of the program."""
        found = self._analysis.found
        changed = {use.operand.operator.id() for use in found.uses if use.is_joined} | set(found.biases)
        return not self._analysis.kind(value).learned and all(
            _may_move(operator)
            and operator.id() not in changed
            and not any(result.id in found.means for result in operator.results())
            for operator in _makers(value)
        )

    def _move_ahead(self, values: Sequence[Any]) -> Any:
        """Move what computes ``values`` to the front; returns the first operator behind it."""
        moved = {operator.id() for value in values for operator in _makers(value)}
        operators = list(paddle.static.default_main_program().global_block().ops)
        anchor = next(each for each in operators if each.id() not in moved and not each.name().startswith(_DECLARES))
        ahead = True
        for operator in operators:
            if operator.id() == anchor.id():
                ahead = False
            elif operator.id() in moved and not ahead:
                operator.move_before(anchor)
        return anchor


def _makers(value: Any) -> list[Any]:
    return operators_behind(value) if value.get_defining_op() is not None else []


def _may_move(operator: Any) -> bool:
    """Whether an operator may be moved: not one that draws at random, whose numbers in another order are others."""
    name = operator.name()
    if name.endswith("_"):
        return name in ("pd_op.assign_value_", "pd_op.share_data_")
    return name.startswith(("pd_op.", "builtin.")) and not operator.num_regions() and not draws(operator)


def _read_by(root: SampleCount) -> list[Any]:
    return [root.value] if root.weights is None else [root.value, root.weights]


def _product(roots: Sequence[SampleCount]) -> Any:
    """Insert the product of values, float64 []."""
    number = _number(roots[0])
    for root in roots[1:]:
        number = number * _number(root)
    return number


def _number(root: SampleCount) -> Any:
    if root.axis is not None:
        return paddle.shape(root.value)[root.axis].cast("float64")
    if root.ignored is None:
        return (root.value != 0).cast("float64").sum()
    counts = root.value != root.ignored
    if root.weights is None:
        return counts.cast("float64").sum()
    classes = paddle.where(counts, root.value, paddle.zeros_like(root.value)).flatten()
    return (paddle.gather(root.weights, classes).cast("float64") * counts.flatten().cast("float64")).sum()
