"""The counts of a loss, which no parameter changes: they are computed and sent before the forward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import paddle

from fleet_train.collectives.joint_values import JointValues
from fleet_train.convert.passes.exchanged import mean_over_ranks
from fleet_train.convert.passes.joint_batch.analysis import Analysis
from fleet_train.convert.passes.joint_batch.axes import Root
from fleet_train.convert.passes.joint_batch.kinds import is_float
from fleet_train.convert.passes.program import draws, line_of, operators_behind
from fleet_train.errors import ConversionError

_DECLARES = ("pd_op.data", "builtin.parameter", "pd_op.full", "pd_op.full_int_array", "builtin.constant")


class Counts:
    """Those of one loss: what is to be divided by is their mean over ranks."""

    def __init__(
        self, analysis: Analysis, values: JointValues, known: Collection[tuple[int, bool]], *, is_merged: bool
    ) -> None:
        """``known``: values that are joined already. ``is_merged``: with other micro-batches, where what is 0 here may
        not be; it is read as 1."""
        self._analysis, self._values, self._known, self._is_merged = analysis, values, known, is_merged
        self._what = f"counts of the batch, {len(values.exchanges)}"
        self._numbers: dict[tuple[Any, ...], Any] = {}
        self._sent: dict[int, Any] = {}
        self._means: dict[int, Any] = {}
        self._raw: dict[int, Any] = {}

    def start(self) -> None:
        """Insert what computes them, ahead of everything else, and what starts their exchange."""
        found = self._analysis.found
        joined = {use.operand.value.id: use.operand.value for use in found.uses if use.is_joined and not use.learned}
        joined = {name: value for name, value in joined.items() if (name, False) not in self._known}
        products = {_key(roots): roots for roots in found.means.values()}
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

    def number(self, roots: Sequence[Root]) -> Any:
        """The product of these numbers on this rank: a value of the program, float64 [], of the current place."""
        key = _key(roots)
        if key not in self._numbers:
            self._numbers[key] = _product(roots)
        return self._numbers[key]

    def mean(self, name: Any, value: Any) -> Any:
        """The mean over ranks of a count; ``value``: what is read in its place now."""
        if name.id not in self._means:
            if name.id in self._sent:
                means = self._values.means(self._what, list(self._sent.values()))
            else:
                own = value if is_float(value) else value.cast("float64")
                means = [own if self._analysis.ranks == 1 else mean_over_ranks(own)]
            for each, mean in zip(self._sent if name.id in self._sent else [name.id], means, strict=True):
                mean.stop_gradient = True
                self._means[each] = self._not_zero(mean) if self._is_merged else mean
                self._raw[each] = mean
        return self._means[name.id]

    def _not_zero(self, mean: Any) -> Any:
        return paddle.where(mean == 0, paddle.ones_like(mean), mean)

    def refuse_several(self) -> None:
        """Raise ConversionError for what one weight per micro-batch does not make the joint batch's."""
        if not self._is_merged:
            return
        found = self._analysis.found
        places: dict[Any, Any] = {}
        for use in found.uses:
            if use.is_joined:
                places.setdefault(("value", use.operand.value.id), use.operand.operator)
                if use.learned:
                    raise ConversionError(_needs_all("a number that depends on parameters", [use.operand.operator]))
        for name, roots in found.means.items():
            places.setdefault(_key(roots), self._analysis.maker_of(name))
        others = found.has_fixed_counts + (found.power != 0)
        if places and len(places) + others > 1:
            raise ConversionError(_needs_all("several numbers of the batch", places.values()))

    def single(self) -> Any:
        """The mean over ranks of the only count, by which micro-batches are weighted: float64 [], inserted at the
        current place. None if there is none, or one micro-batch."""
        if not self._is_merged:
            return None
        found = self._analysis.found
        for use in found.uses:
            if use.is_joined:
                self.mean(use.operand.value, use.operand.value)
                return self._raw[use.operand.value.id].cast("float64").reshape([])
        for roots in found.means.values():
            number = self.number(roots)
            self.mean(number, number)
            return self._raw[number.id]
        return None

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


def _needs_all(what: str, operators: Iterable[Any]) -> str:
    lines = ", ".join(dict.fromkeys(line_of(operator) or operator.name() for operator in operators))
    return (
        f"accumulate_steps: the loss depends on {what} ({lines}), so the gradient of the joint batch needs the forward "
        "passes of all micro-batches at once; leave accumulate_steps out, or accept the mean over ranks and "
        "micro-batches: average_over: ranks in the profile, --set average_over=ranks"
    )


def _makers(value: Any) -> list[Any]:
    return operators_behind(value) if value.get_defining_op() is not None else []


def _may_move(operator: Any) -> bool:
    """Not what draws at random: numbers that are drawn in another order are others."""
    name = operator.name()
    if name.endswith("_"):
        return name in ("pd_op.assign_value_", "pd_op.share_data_")
    return name.startswith(("pd_op.", "builtin.")) and not operator.num_regions() and not draws(operator)


def _read_by(root: Root) -> list[Any]:
    return [root.value] if root.weights is None else [root.value, root.weights]


def _key(roots: Sequence[Root]) -> tuple[Any, ...]:
    return tuple((root.value.id, root.axis, root.weights is not None) for root in roots)


def _product(roots: Sequence[Root]) -> Any:
    """Insert their product, float64 []."""
    number = _number(roots[0])
    for root in roots[1:]:
        number = number * _number(root)
    return number


def _number(root: Root) -> Any:
    if root.axis is not None:
        return paddle.shape(root.value)[root.axis].cast("float64")
    if root.ignored is None:
        return (root.value != 0).cast("float64").sum()
    counts = root.value != root.ignored
    if root.weights is None:
        return counts.cast("float64").sum()
    classes = paddle.where(counts, root.value, paddle.zeros_like(root.value)).flatten()
    return (paddle.gather(root.weights, classes).cast("float64") * counts.flatten().cast("float64")).sum()
