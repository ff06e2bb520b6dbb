"""What a loss takes over the whole batch, and what has to be done so that it is taken over all ranks' batches.

A value is per sample, or a number of the batch. A number is a rank's own if its mean over the ranks is the number of
the joint batch, divided by the number of ranks as many times as its degree says: a mean over the batch (degree 0) or a
sum (1). It stays so under what is linear. What is not linear in it, or divides by it, must read that mean over the
ranks instead; constants that such a number is added to or compared with are divided alike. So averaged gradients are
those of the joint batch, whatever the loss divides by, and ranks with equal counts compute the bits of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet_train.convert.passes.exchanged import is_gathered
from fleet_train.convert.passes.joint_batch.axes import Axes, SampleCount, of_batch
from fleet_train.convert.passes.joint_batch.kinds import (
    COMPARES,
    CONSTANT,
    CONSTANTS_LIKE,
    BatchKind,
    Findings,
    Operand,
    Operation,
    Use,
    short,
)
from fleet_train.convert.passes.joint_batch.numbers import Numbers
from fleet_train.convert.passes.joint_batch.samples import Samples
from fleet_train.convert.passes.program import all_inputs_of, nested_operators, operators_behind


class Analysis:
    """Goes through the operators behind a loss, in their order, once."""

    def __init__(
        self, loss: Any, ranks: int, shares: int, known: dict[int, BatchKind], is_alike: Callable[[int], bool]
    ) -> None:
        """``shares``: ranks times micro-batches. ``known``: values that an earlier call has looked at or made.
        ``is_alike``: whether all ranks' programs have this number of samples; it is -1 for one that the feed decides.
        """
        self.ranks, self.shares, self._known = ranks, shares, known
        self.behind = operators_behind(loss)
        fed = [operator.result(0) for operator in self.behind if operator.name() == "pd_op.data"]
        batches = [value for value in fed if value.shape and not value.persistable]
        self._has_unknown_batch = any(value.shape[0] < 0 for value in batches)
        largest = max(batches, key=lambda value: value.shape[0], default=None)
        self._batch = size = -1 if self._has_unknown_batch or largest is None else largest.shape[0]
        self._is_alike = is_alike(size)
        samples = SampleCount(largest, 0, is_alike=self._is_alike) if size >= 0 else None
        self._numbers = Numbers((ranks, shares), samples)
        self._samples = Samples(self._numbers)
        self._choosing: dict[int, Operation] = {}
        """Comparisons of own numbers that only choose blocks, by the id of their results."""
        for operator in self.behind:
            self._look(operator)
        kind = self._numbers.unspread(self._numbers.settle(self.kind(loss)))
        if kind.degree is None and not self.found.undecided:
            self.found.undecided.append((loss.get_defining_op(), "how it grows with the batch is not known"))
        degree = kind.degree or 0
        self.found.divisors = kind.divisors or ()
        if self.found.divisors and degree:
            self.found.several.append(loss.get_defining_op())
        self._join_counts()
        self.found.power = degree + bool(of_batch(self.kind(loss).axes))  # of samples, Paddle derives the sum

    @property
    def found(self) -> Findings:
        return self._numbers.found

    def kind(self, value: Any) -> BatchKind:
        """What is known of a value behind the loss."""
        return self._known.get(value.id, CONSTANT)

    def _join_counts(self) -> None:
        counts = {value.id for value in self.found.counts}
        for operator in self.behind if counts else ():
            if operator.name() != "builtin.combine":
                read = [operand for operand in _operands(operator) if operand.value.id in counts]
                self.found.uses += [Use(operand, is_joined=True) for operand in read]

    def _look(self, operator: Any) -> None:
        results = [result for result in operator.results() if result.initialized() and result.id not in self._known]
        if not results or operator.name() == "builtin.combine":  # its operands are those of who reads it
            return
        name, operands = short(operator), _operands(operator)
        read = [*all_inputs_of(operator), *(operand.value for operand in operands)]
        learned = any(self.kind(value).learned for value in read)
        if name in CONSTANTS_LIKE and operands:
            roots = [root for each in self.kind(operands[0].value).axes.values() for root in each]
            learned = learned and not all(root.is_fed or root.is_static for root in roots)
        step = Operation(operator, name, operands, [self.kind(operand.value) for operand in operands], learned)
        if name in ("data", "builtin.parameter"):
            self._known[results[0].id] = self._begin(results[0])
        elif is_gathered(operator):
            unknown = [axis for axis, size in enumerate(results[0].shape) if size < 0]
            self._known[results[0].id] = BatchKind(
                {axis: (SampleCount(results[0], axis, False, is_gathered=True),) for axis in unknown}, learned=learned
            )
        elif operator.num_regions():
            self._known |= self._of_blocks(step)
        elif _only_chooses(operator) and any(kind.own and not kind.axes for kind in step.kinds):
            self._choosing[results[0].id] = step
            self._known[results[0].id] = BatchKind(own=True)
        elif not any(kind.is_of_feed for kind in step.kinds):
            kind = self._numbers.of_gathered(step)
            self._known |= {result.id: kind for result in results}
        elif not operator.name().startswith(("pd_op.", "builtin.")):
            self._known |= {result.id: self._unseen(step, result) for result in results}
        elif any(kind.axes for kind in step.kinds):
            self._known |= self._samples.results_of(step)
        else:
            kind = self._numbers.result_of(step)
            self._known |= {result.id: kind for result in results}

    def _begin(self, value: Any) -> BatchKind:
        """The kind of a variable, or of what is fed."""
        if value.persistable or value.get_defining_op().name() == "builtin.parameter":
            return BatchKind(learned=not value.stop_gradient)
        shape = list(value.shape)
        unknown = [axis for axis, size in enumerate(shape) if size < 0]
        samples = min(unknown, default=0) if self._has_unknown_batch else 0  # time may be first, and known
        axes = {axis: (SampleCount(value, axis, axis == samples),) for axis in unknown}
        if self._has_unknown_batch:
            return BatchKind(axes, fed=() if axes or not _is_one(shape) else (value,))
        if (shape and (shape[0] != 1 or self._batch == 1)) or len(shape) > 1:
            return BatchKind({0: (SampleCount(value, 0, is_alike=self._is_alike),)} | axes)
        return BatchKind(fed=(value,))

    def _of_blocks(self, step: Operation) -> dict[int, BatchKind]:
        """The kinds of the results of ``cond``, a loop or the like. A condition on numbers, in whose blocks only
        numbers are read, is a function of them, and reads the joint batch's."""
        chosen = [operand.value for operand in step.operands if operand.value.id in self._choosing]
        operands = [operand for operand in step.operands if operand.value.id not in self._choosing]
        inner = [operand for each in nested_operators(step.operator) for operand in _operands(each)]
        operands += [operand for operand in inner if self.kind(operand.value).is_of_feed]
        kinds = [self.kind(operand.value) for operand in operands]
        whole = Operation(step.operator, step.name, operands, kinds, step.learned)
        are_numbers = all(not kind.axes and kind.sizes is None and kind.degree is not None for kind in kinds)
        results = [result for result in step.operator.results() if result.initialized()]
        if not chosen and not any(kind.is_of_feed for kind in kinds):
            return {result.id: BatchKind(learned=step.learned) for result in results}
        if step.name != "if" or not are_numbers:
            return {result.id: self._unseen(whole, result) for result in results}
        for value in chosen:
            self._choose(value)
        kind = self._numbers.result_of(whole) if operands else BatchKind(learned=step.learned)
        return {result.id: kind for result in results}

    def _choose(self, value: Any) -> None:
        """Let the comparisons behind a condition read the joint batch's numbers."""
        step = self._choosing[value.id]
        combined = [operand.value for operand in step.operands if operand.value.id in self._choosing]
        for each in combined:
            self._choose(each)
        if not combined:
            self._numbers.result_of(step)

    def _unseen(self, step: Operation, result: Any) -> BatchKind:
        """The kind of a block's result, or of a script's own operator's: what it computes of samples is not known."""
        axes: Axes = {}
        if any(kind.axes for kind in step.kinds) and result.is_dense_tensor_type():
            axes = {axis: (SampleCount(result, axis, axis == 0),) for axis, size in enumerate(result.shape) if size < 0}
        is_unused = result.use_empty() and step.operator.num_results() > 1
        if not axes and not is_unused:
            what = "what it computes of the batch cannot be seen"
            if step.operator.num_regions():
                what = "what its blocks compute of the batch cannot be seen: take sums and counts in front of it"
            self.found.undecided.append((step.operator, what))
        return BatchKind(axes, 0 if axes else None, learned=step.learned)


def _operands(operator: Any) -> list[Operand]:
    """The operands of an operator that are there, through ``combine``."""
    found = []
    for index, value in enumerate(operator.operands_source()):
        maker = value.get_defining_op() if value.initialized() else None
        if maker is not None and maker.name() == "builtin.combine":
            found += [Operand(maker, place, each) for place, each in enumerate(maker.operands_source())]
        elif value.initialized():
            found.append(Operand(operator, index, value))
    return found


def _only_chooses(operator: Any) -> bool:
    """Whether it is a comparison that says which block of a condition runs, and nothing else; also of several."""
    users = operator.result(0).all_used_ops() if short(operator) in COMPARES else []
    return bool(users) and all(user.num_regions() or _only_chooses(user) for user in users)


def _is_one(shape: list[int]) -> bool:
    return all(size == 1 for size in shape)
