"""Rules for operators on values that are per sample: what they take over the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fleet_train.convert.passes.exchanged import TO_THE_END
from fleet_train.convert.passes.joint_batch.axes import (
    Axes,
    SampleCount,
    are_gathered,
    carried,
    contracted_axes,
    divided_axes,
    integers,
    named_axes,
    of_batch,
    reduced_axes,
)
from fleet_train.convert.passes.joint_batch.kinds import (
    ADDS,
    ALONG,
    CHOOSES,
    CONSTANTS_LIKE,
    COUNTS,
    EXTREMES,
    MEANS,
    MOVES,
    SCALES,
    SIZED_BY,
    SUMS,
    BatchKind,
    Operation,
    difference,
    is_float,
    total,
)
from fleet_train.convert.passes.joint_batch.numbers import Numbers


class Samples:
    """Notes what operators with operands per sample take over the batch. One that is not known and keeps the samples
    is taken to compute each of them alone."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers, self._found = numbers, numbers.found

    def results_of(self, step: Operation) -> dict[int, BatchKind]:
        """The kinds of an operator's results, by their id."""
        if step.name in ("shape", "shape64"):
            axes, rank = step.kinds[0].axes, len(step.sources[0].shape)
            return {step.operator.result(0).id: BatchKind(sizes=tuple(axes.get(axis, ()) for axis in range(rank)))}
        step = self._numbers.settled(step)
        self._join_numbers(step)
        degree, divisors = self._degree(step.values), self._numbers.divisors(step.values)
        reduces = step.name in (*SUMS, *MEANS, *EXTREMES, "numel")
        reduced = reduced_axes(step.operator, step.name, step.sources) if reduces else None
        if reduces and reduced is None:
            self._found.undecided.append((step.operator, "which dimensions it takes is computed"))
        self._divide(step)
        results = {}
        for result in _single(step.operator.results()):
            axes = carried(step.operator, step.name, result, step.sources, [kind.axes for kind in step.kinds], reduced)
            kind = self._result(step, result, axes, reduced or set(), degree)
            roots = self._found.means.get(result.id)
            kind = replace(kind, divisors=divisors if roots is None or divisors is None else (*divisors, roots))
            keeps_factors = step.name in (*SCALES, *MOVES, *SUMS)
            results[result.id] = replace(kind, fed=step.fed, spread=step.spread) if keeps_factors else kind
        return results

    def _join_numbers(self, step: Operation) -> None:
        sized_by = SIZED_BY.get(step.name, ())
        for place, (operand, kind) in enumerate(zip(step.operands, step.kinds, strict=True)):
            is_size = place in sized_by or (kind.sizes is not None and not is_float(operand.value))
            if (kind.own or kind.shared) and not is_size:
                self._numbers.join(operand, kind, back=True)
                if kind.learned:
                    self._found.several.append(step.operator)

    def _degree(self, step: Operation) -> int | None:
        if step.name in ("multiply", "matmul", "einsum"):
            return total(kind.degree for kind in step.kinds)
        if step.name == "divide":
            return difference(*step.kinds)
        if step.name in (*ADDS, *CHOOSES, "concat", "stack"):
            return self._numbers.one_degree(step, int(step.name == "where" and len(step.kinds) > 1))
        if step.name in (*MOVES, *SUMS[:1], *MEANS):
            return step.kinds[0].degree
        if step.name == "scale":
            return step.kinds[0].degree if not step.operator.attrs()["bias"] else self._numbers.shifted(step)
        if step.name in CONSTANTS_LIKE:
            return 0
        self._numbers.to_joint(step)
        return 0

    def _result(self, step: Operation, result: Any, axes: Axes, reduced: set[int], degree: int | None) -> BatchKind:
        first, name = step.kinds[0].axes, step.name
        over = of_batch(first).intersection(reduced)
        if self._meet(step, axes, over):
            self._found.undecided.append((step.operator, _MEETING))
            return BatchKind(axes, None, learned=step.learned)
        if of_batch(axes) or not any(of_batch(kind.axes) for kind in step.kinds):
            gathered = not axes and are_gathered(kind.axes for kind in step.kinds)
            return BatchKind(axes, degree, learned=step.learned, gathered=gathered)
        if name != "nll_loss" and step.operator.has_attr("reduction") and not over:
            name, over, reduced = step.operator.attrs()["reduction"], of_batch(first), set(first)
        number = BatchKind(axes, degree, own=True, learned=step.learned)
        summed = BatchKind(axes, total((degree, 1)), own=True, learned=step.learned)
        if name == "numel":
            roots = tuple(root for each in first.values() for root in each)
            return BatchKind({}, 1, own=not all(root.is_static for root in roots), sizes=(roots,))
        if name in MEANS and over:
            roots = tuple(root for axis in sorted(reduced) for root in first.get(axis, ()))
            return self._mean(result, roots, number)
        if name == "nll_loss" and step.operator.attrs()["reduction"] == "mean" and result.index() == 0:
            weights = step.sources[2] if len(step.sources) > 2 else None
            ignored = step.operator.attrs()["ignore_index"]
            return self._mean(result, (SampleCount(step.sources[1], None, weights=weights, ignored=ignored),), number)
        if (name in SUMS and over) or name in ("nll_loss", "matmul", "einsum"):
            return summed
        if not result.use_empty() and "batch_norm" not in name:
            self._found.undecided.append((step.operator, "what it takes of the batch is not known"))
        return BatchKind(axes, None, learned=step.learned)

    def _mean(self, result: Any, roots: tuple[SampleCount, ...], kind: BatchKind) -> BatchKind:
        if not all(root.is_static for root in roots):
            self._found.means[result.id] = roots
        return kind

    def _divide(self, step: Operation) -> None:
        """Some samples, taken by their places, are others in the joint batch, unless a script has put them there."""
        axes, operator = step.kinds[0].axes, step.operator
        divided = divided_axes(operator, step.name)
        parted = of_batch(axes) if divided is None else of_batch(axes).intersection(divided)
        if not parted:
            return
        parts = list(_single(operator.results()))
        # Up to a number that is in the program: that may be the batch's.
        starts = integers(step.sources[1]) if step.name == "slice" and len(step.sources) > 1 else None
        is_whole = starts is not None and not any(starts) and not operator.attrs()["decrease_axis"]
        if is_whole:
            ends = dict(zip(operator.attrs()["axes"], integers(step.sources[2]) or (), strict=False))
            if any(step.sources[0].shape[axis] < 0 < ends.get(axis, 0) < TO_THE_END for axis in parted):
                self._found.assumed.append((operator, "the number of samples of a rank"))
        if is_whole or (len(parts) > 1 and not any(part.use_empty() for part in parts)):
            return
        if any(root.is_fed for axis in parted for root in axes[axis]):
            self._found.undecided.append((operator, _BY_PLACE))

    def _meet(self, step: Operation, axes: Axes, over: set[int]) -> bool:
        """Whether samples are computed with each other."""
        operator, given = step.operator, [of_batch(kind.axes) for kind in step.kinds]
        if step.name == "einsum":
            return _meet_in(operator.attrs()["equation"], given)
        if step.name == "matmul":
            summed = [
                axis in batch for axis, batch in zip(contracted_axes(operator, step.sources), given, strict=False)
            ]
            if any(summed) != all(summed):
                return True
        if step.name in EXTREMES:
            return bool(over)
        if step.name in COUNTS:
            return bool(given[0])
        if step.name in ALONG:
            return bool(given[0].intersection(named_axes(operator, step.sources) or ()))
        return len(of_batch(axes)) > max(map(len, given))


def _single(results: Iterable[Any]) -> Iterator[Any]:
    """The tensors among an operator's results that are there, also those of lists."""
    for result in results:
        if result.initialized() and result.is_dense_tensor_type():
            yield result
        elif result.initialized():
            yield from (each for user in result.all_used_ops() for each in user.results() if "split" in user.name())


_MEETING = "samples meet each other"
_BY_PLACE = "samples are taken by their places in the batch"


def _meet_in(equation: str, given: list[set[int]]) -> bool:
    """Whether samples of two operands meet in a sum of products: more than one letter stands for them."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if "." in equation:
        return True
    letters = {term[axis] for term, batch in zip(terms, given, strict=True) for axis in batch}
    without = [term for term, batch in zip(terms, given, strict=True) if batch and not letters.intersection(term)]
    return len(letters) > 1 or bool(without)
