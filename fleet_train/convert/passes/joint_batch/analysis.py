"""What a loss takes over the whole batch, and what has to be done so that it is taken over all ranks' batches.

A value is per sample, or a number of the batch. A number is a rank's own if its mean over the ranks is the number of
the joint batch, divided by the number of ranks as many times as its degree says: a mean over the batch (degree 0) or a
sum (1). It stays so under what is linear. What is not linear in it, or divides by it, must read that mean over the
ranks instead; constants that such a number is added to or compared with are divided alike. So averaged gradients are
those of the joint batch, whatever the loss divides by, and ranks with equal counts compute the bits of their own.
"""

from __future__ import annotations

from typing import Any

from fleet_train.convert.passes.exchanged import is_gathered
from fleet_train.convert.passes.joint_batch.axes import Axes, Root, of_batch
from fleet_train.convert.passes.joint_batch.kinds import CONSTANT, Findings, Kind, Operand, Step, short
from fleet_train.convert.passes.joint_batch.numbers import Numbers
from fleet_train.convert.passes.joint_batch.samples import Samples
from fleet_train.convert.passes.program import all_inputs_of, operators_behind


class Analysis:
    """Goes through the operators behind a loss, in their order, once."""

    def __init__(self, loss: Any, ranks: int, shares: int, known: dict[int, Kind]) -> None:
        """``shares``: ranks times micro-batches. ``known``: values that an earlier call has looked at or made."""
        self.ranks, self.shares, self._known = ranks, shares, known
        self.behind = operators_behind(loss)
        fed = [operator.result(0) for operator in self.behind if operator.name() == "pd_op.data"]
        first = [value.shape[0] for value in fed if value.shape and not value.persistable]
        self._has_unknown_batch = any(size < 0 for size in first)
        batch = max(first, default=0) if not self._has_unknown_batch else None
        self._numbers = Numbers(shares, batch)
        self._samples = Samples(self._numbers)
        for operator in self.behind:
            self._look(operator)
        degree = self.kind(loss).degree or 0
        self.found.power = degree + bool(of_batch(self.kind(loss).axes))  # of samples, Paddle derives the sum

    @property
    def found(self) -> Findings:
        return self._numbers.found

    def maker_of(self, name: int) -> Any:
        """The operator behind the loss that makes a value, by the value's id."""
        return next(each for each in self.behind if any(result.id == name for result in each.results()))

    def kind(self, value: Any) -> Kind:
        """Of a value behind the loss."""
        return self._known.get(value.id, CONSTANT)

    def _look(self, operator: Any) -> None:
        results = [result for result in operator.results() if result.initialized() and result.id not in self._known]
        if not results:
            return
        name, operands = short(operator), _operands(operator)
        learned = any(self.kind(value).learned for value in all_inputs_of(operator))
        step = Step(operator, name, operands, [self.kind(operand.value) for operand in operands], learned)
        if name in ("data", "builtin.parameter"):
            self._known[results[0].id] = self._begin(results[0])
        elif is_gathered(operator):
            unknown = [axis for axis, size in enumerate(results[0].shape) if size < 0]
            self._known[results[0].id] = Kind({axis: (Root(results[0], axis, False),) for axis in unknown})
        elif not any(kind.is_of_feed for kind in step.kinds):
            self._known |= {result.id: Kind(learned=learned) for result in results}
        elif operator.num_regions() or not operator.name().startswith(("pd_op.", "builtin.")):
            self._known |= {result.id: self._unseen(step, result) for result in results}
        elif any(kind.axes for kind in step.kinds):
            self._known |= self._samples.results_of(step)
        else:
            kind = self._numbers.result_of(step)
            self._known |= {result.id: kind for result in results}

    def _begin(self, value: Any) -> Kind:
        """Of a variable, or of what is fed."""
        if value.persistable or value.get_defining_op().name() == "builtin.parameter":
            return Kind(learned=not value.stop_gradient)
        shape = list(value.shape)
        axes = {axis: (Root(value, axis, axis == 0),) for axis, size in enumerate(shape) if size < 0}
        if self._has_unknown_batch:
            if shape and shape[0] < 0:
                return Kind(axes)
            return Kind(axes, None if _is_one(shape) else 0, fed=_is_one(shape))
        if (shape and not _is_one(shape[:1])) or len(shape) > 1:
            return Kind({0: (Root(value, 0),)} | axes)
        return Kind(degree=None, fed=True)

    def _unseen(self, step: Step, result: Any) -> Kind:
        """Of a block, or of an operator of the script: what it computes of samples is not known."""
        axes: Axes = {}
        if any(kind.axes for kind in step.kinds) and result.is_dense_tensor_type():
            axes = {axis: (Root(result, axis, axis == 0),) for axis, size in enumerate(result.shape) if size < 0}
        if not axes and not result.use_empty():
            self.found.undecided.append((step.operator, "what it computes of the batch cannot be seen"))
        return Kind(axes, 0 if axes else None, learned=step.learned)


def _operands(operator: Any) -> list[Operand]:
    """Those that are there, through ``combine``."""
    found = []
    for index, value in enumerate(operator.operands_source()):
        maker = value.get_defining_op() if value.initialized() else None
        if maker is not None and maker.name() == "builtin.combine":
            found += [Operand(maker, place, each) for place, each in enumerate(maker.operands_source())]
        elif value.initialized():
            found.append(Operand(operator, index, value))
    return found


def _is_one(shape: list[int]) -> bool:
    return all(size == 1 for size in shape)
