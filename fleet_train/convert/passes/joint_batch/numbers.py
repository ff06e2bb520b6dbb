"""Rules for operators on numbers of the batch: which must read the joint batch's."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fleet_train.convert.passes.joint_batch.axes import SampleCount, constant, integers, key_of
from fleet_train.convert.passes.joint_batch.kinds import (
    ADDS,
    CHOOSES,
    COLLECTS,
    CONSTANT,
    CONSTANTS_LIKE,
    MOVES,
    SCALES,
    SIZED_BY,
    BatchKind,
    Divisors,
    Findings,
    Operand,
    Operation,
    Use,
    difference,
    is_float,
    total,
)

# Weights of terms are seldom as small and as round as one over such a number, which may count samples.
_LEAST_COUNT = 4


class Numbers:
    """Notes in ``found`` what operators on numbers are to read."""

    def __init__(self, shares: Collection[int], batch: SampleCount | None) -> None:
        """``shares``: the number of ranks, and of what gradients are averaged over. ``batch``: the number of samples,
        if it is in the program."""
        self.found = Findings()
        self._shares, self._batch = shares, batch

    def result_of(self, step: Operation) -> BatchKind:
        """The kind of the results of an operator without operands that are per sample."""
        step = self.settled(step)
        kind = self._result_of(step)
        return replace(kind, fed=step.fed if not kind.own or step.name in (*SCALES, *MOVES) else ())

    def of_gathered(self, step: Operation) -> BatchKind:
        """The kind of an operator that reads nothing of the batch, but perhaps numbers of what all ranks have gathered.
        Such a number by the number of shares is a factor of a sum that is spread over them."""
        spread, gathered = step.spread, any(kind.gathered for kind in step.kinds)
        if gathered and step.name in SCALES:
            numbers = [float(shares) ** power for shares in self._shares if shares > 1 for power in (1, -1)]
            factors = filter(None, map(constant, step.sources))
            if any(math.isclose(factor, number, rel_tol=1e-6) for factor in factors for number in numbers):
                spread = step.operator
        return BatchKind(learned=step.learned, spread=spread, gathered=gathered)

    def settled(self, step: Operation) -> Operation:
        """Decide about fed numbers, ahead of what is neither a product nor moves elements."""
        if step.name in (*SCALES, *MOVES):
            return step
        return replace(step, kinds=[self.settle(kind) for kind in step.kinds])

    def settle(self, kind: BatchKind) -> BatchKind:
        """A fed number by which a sum is divided, or multiplied, counts its samples."""
        if not kind.fed or not (kind.own or kind.axes):
            return kind
        if kind.degree != 1 or kind.axes:
            return replace(kind, fed=())
        self.found.counts.extend(filter(is_float, kind.fed))
        return replace(kind, degree=0, fed=())

    def _result_of(self, step: Operation) -> BatchKind:
        name, kinds = step.name, step.kinds
        if name in CONSTANTS_LIKE:
            return CONSTANT
        made = step.operator.result(0)
        if name in SIZED_BY and made.is_dense_tensor_type() and any(size < 0 for size in made.shape):
            return _of_size(step)
        if kinds[0].sizes is not None and not kinds[0].own:
            return _of_shape(step)
        if step.sizes is not None and not all(map(is_float, step.operator.results())):
            return self._of_sizes(step)
        if name == "multiply":
            return self._product(step)
        if name == "divide":
            return self._quotient(step)
        if name == "scale":
            return self._scaled(step)
        own = any(kind.own for kind in kinds)
        result = BatchKind({}, kinds[0].degree, own, step.learned, step.is_shared, divisors=self.divisors(step))
        if name in ADDS or name in COLLECTS:
            step = self._unspread_beside_others(step)
            return replace(result, degree=self.one_degree(step), spread=step.spread)
        if name == "cast" and own:
            return self._cast(step, result)
        if name in MOVES or name.startswith("builtin."):
            return replace(result, spread=kinds[0].spread)
        return self._nonlinear(step)

    def _nonlinear(self, step: Operation) -> BatchKind:
        for operand, kind in zip(step.operands, step.kinds, strict=True):
            if kind.own:
                self.join(operand, kind)
        own = any(kind.own for kind in step.kinds)
        if own and (step.learned or self._has_high_bound(step)):
            self.found.several.append(step.operator)
        joined = BatchKind(learned=step.learned, shared=step.learned and (own or step.is_shared))
        first = int(step.name == "where")
        if step.name in CHOOSES and all(map(is_float, step.sources[first:])):
            return replace(joined, degree=self.one_degree(step, first))
        self.to_joint(step)
        is_known = total(kind.degree for kind in step.kinds) is not None
        return replace(joined, degree=0 if is_known else None, divisors=None)

    def _has_high_bound(self, step: Operation) -> bool:
        """Whether a count has to be at least more than 1: of micro-batches, all together have to."""
        if step.name not in ("clip", "maximum", "fmax"):
            return False
        bounds = step.sources[1:2] if step.name == "clip" else step.sources
        return any((constant(value) or 0.0) > 1.0 for value in bounds)

    def _cast(self, step: Operation, result: BatchKind) -> BatchKind:
        if is_float(step.sources[0]) and not is_float(step.operator.result(0)):
            return self._nonlinear(step)
        if result.degree is None and step.kinds[0].sizes is not None:
            self.found.undecided.append((step.operator, "how this number grows with the batch is not known"))
        return result

    def _of_sizes(self, step: Operation) -> BatchKind:
        """The kind of integers that are computed of sizes: they stay this rank's, because they may be sizes again."""
        degree = total(kind.degree for kind in step.kinds) if step.name == "multiply" else None
        if step.name in MOVES:
            degree = step.kinds[0].degree
        own = any(kind.own for kind in step.kinds)
        return BatchKind({}, degree, own=own, learned=step.learned, sizes=step.sizes)

    def _product(self, step: Operation) -> BatchKind:
        both = all(kind.own for kind in step.kinds)
        own = self._join_factors(step, [both, both])
        degree, shared = total(kind.degree for kind in step.kinds), self._is_shared(step, own)
        return BatchKind({}, degree, own, step.learned, shared, spread=step.spread, divisors=self.divisors(step))

    def _quotient(self, step: Operation) -> BatchKind:
        first, second = step.kinds
        own = self._join_factors(step, [False, second.own])
        degree, shared = difference(first, second), self._is_shared(step, own)
        return BatchKind({}, degree, own, step.learned, shared, spread=step.spread, divisors=self.divisors(step))

    def _join_factors(self, step: Operation, joined: list[bool]) -> bool:
        """Join numbers that are multiplied or divided; ``joined``: those that have to be unless another one is.
        Returns whether the result is a rank's own.

        A joint number that depends on a parameter has its own gradient on each rank, which the other factor
        multiplies: that must be the joint one as well.
        """
        kinds = step.kinds
        if all(joined):
            keep = 0 if kinds[0].learned or not kinds[1].learned else 1
            joined[keep] = False
        depends = [
            kind.shared or (is_joined and has_gradient(operand.value, kind))
            for operand, kind, is_joined in zip(step.operands, kinds, joined, strict=True)
        ]
        joined = [kinds[0].own and (joined[0] or depends[1]), kinds[1].own and (joined[1] or depends[0])]
        for operand, kind, is_joined in zip(step.operands, kinds, joined, strict=True):
            if is_joined:
                self.join(operand, kind)
        if any(joined) and any(depends):
            self.found.several.append(step.operator)
        return any(kind.own and not is_joined for kind, is_joined in zip(kinds, joined, strict=True))

    def _is_shared(self, step: Operation, own: bool) -> bool:
        return step.is_shared or (not own and any(kind.own and kind.learned for kind in step.kinds))

    def _scaled(self, step: Operation) -> BatchKind:
        """The kind of a number times a constant, plus a constant."""
        kind, operator = replace(step.kinds[0], learned=step.learned), step.operator
        factor = constant(step.sources[1]) if len(step.sources) > 1 else None
        if kind.degree and operator.attrs()["bias"]:
            if kind.own and not step.learned:  # so that it is sent early
                self.join(step.operands[0], kind)
                kind = replace(kind, own=False)
            self.found.biases[operator.id()] = kind.degree or 0
        return kind if factor is None or kind.degree != 1 else self._counted(operator, kind, factor)

    def _counted(self, operator: Any, kind: BatchKind, factor: float) -> BatchKind:
        """The kind of a sum over the batch times a constant: perhaps one over a count of samples, or that of shares."""
        inverse = 1 / abs(factor) if factor else 0.0
        is_whole = inverse >= _LEAST_COUNT and abs(inverse - round(inverse)) < 1e-4 * inverse
        if factor in self._shares and factor != 1.0:
            return replace(kind, spread=operator)
        if kind.spread is not None or not is_whole or (self._batch and round(inverse) % self._batch.value.shape[0]):
            return kind
        if self._batch and not self._batch.is_alike and kind.learned:
            self.found.means[operator.result(0).id] = (self._batch,)
            return replace(kind, degree=0)
        if self._batch is None and kind.learned:
            count = f"one over the number of samples of a rank, {round(inverse)}"
            self.found.assumed.append((operator, f"{count}; multiply a weight of a sum by fleet.worker_num()"))
        return replace(kind, degree=0 if kind.learned else None)

    def divisors(self, step: Operation) -> Divisors | None:
        """What an operator's results are divided by; None if that is not known."""
        kinds = step.kinds
        if step.name == "divide":
            return self._divided(step)
        parts = [kind for kind in kinds if kind.axes or kind.own or kind.learned or kind.divisors != ()]
        found = [kind.divisors for kind in parts]
        if step.name in ("multiply", "matmul", "einsum"):
            counts = [kind for kind in kinds if kind.is_of_feed and not (kind.axes or kind.learned or kind.divisors)]
            if None in found or counts:
                if step.learned:
                    self.found.several.append(step.operator)
                return None
            return tuple(divisor for each in found for divisor in each or ())
        if step.learned and step.name in (*ADDS, *COLLECTS):
            terms = [kind for kind in kinds if kind.is_of_feed and (kind.axes or kind.own or kind.shared)]
            if len({_keys(kind.divisors) for kind in terms}) > 1:
                self.found.several.append(step.operator)
            found = [kind.divisors for kind in terms]
        if any(kind.axes for kind in kinds) and any(kind.own and not kind.axes for kind in kinds):
            return None
        return found[0] if found else ()

    def _divided(self, step: Operation) -> Divisors | None:
        first, second = step.kinds
        if second.axes or not second.is_of_feed:
            return first.divisors
        is_count = first.is_of_feed and not (first.axes or first.learned)
        are_several = math.prod(step.sources[1].shape) != 1
        if (
            is_count
            or are_several
            or first.divisors is None
            or second.divisors is None
            or has_gradient(step.sources[1], second)
        ):
            if first.learned:
                self.found.several.append(step.operator)
            return None
        return (*first.divisors, step.operands[1])

    def unspread(self, kind: BatchKind) -> BatchKind:
        """The kind of a loss, or of a term of it, without the factor for its spreading: what is multiplied by the
        number of shares there does not grow with them."""
        if kind.spread is None or kind.degree != 1:
            return replace(kind, spread=None)
        factor = next(filter(None, map(constant, kind.spread.operands_source())))
        self.found.assumed.append((kind.spread, f"the number of shares, {factor:g}, that this sum is spread over"))
        return replace(kind, degree=0, spread=None)

    def _unspread_beside_others(self, step: Operation) -> Operation:
        """Take off the factor of terms beside one that does not grow with the batch, and not beside sums."""
        sums = [kind for kind in step.kinds if kind.degree == 1 and kind.spread is None]
        terms = [kind for kind in step.kinds if kind.degree == 0 and kind.learned]
        if not sums and terms:
            return replace(step, kinds=[self.unspread(kind) for kind in step.kinds])
        return replace(step, kinds=[replace(kind, spread=None) for kind in step.kinds]) if sums else step

    def one_degree(self, step: Operation, first: int = 0) -> int | None:
        """Bring numbers that are added or compared to the highest degree among them; returns it."""
        pairs = list(zip(step.operands, step.kinds, strict=True))[first:]
        if step.name in COLLECTS:  # the last one says where
            pairs = [(operand, kind) for operand, kind in pairs if kind.is_of_feed or is_float(operand.value)]
        degrees = [kind.degree for _, kind in pairs]
        known = [degree for degree in degrees if degree is not None]
        if len(known) < len(degrees) or not all(is_float(operand.value) for operand, _ in pairs):
            return degrees[0] if len(set(degrees)) == 1 else None
        highest = max(known)
        for (operand, _), degree in zip(pairs, known, strict=True):
            if degree != highest:
                self.found.uses.append(Use(operand, power=degree - highest))
        return highest

    def shifted(self, step: Operation) -> int | None:
        """The degree of samples to which a constant is added, as is noted."""
        degree = step.kinds[0].degree
        if degree:
            self.found.biases[step.operator.id()] = degree
        return degree

    def to_joint(self, step: Operation) -> None:
        """Let an operator read the joint batch's numbers themselves."""
        for operand, kind in zip(step.operands, step.kinds, strict=True):
            if kind.degree and not (kind.own and not is_float(operand.value)):  # an integer is joined to its sum
                self.found.uses.append(Use(operand, power=kind.degree))

    def join(self, operand: Operand, kind: BatchKind, *, back: bool = False) -> None:
        """Let an operand be the mean over ranks."""
        self.found.uses.append(Use(operand, kind.own, back and kind.learned, kind.learned))


def has_gradient(value: Any, kind: BatchKind) -> bool:
    """Whether a gradient flows back through a value into a parameter."""
    return kind.learned and not value.stop_gradient


def _keys(divisors: Divisors | None) -> Any:
    """Keys that are equal for equal numbers."""
    if divisors is None:
        return None
    return tuple(sorted(str(each.value.id if isinstance(each, Operand) else key_of(each)) for each in divisors))


def _of_size(step: Operation) -> BatchKind:
    """The kind of a value that has as many elements as a number of the batch says."""
    result = step.operator.result(0)
    unknown = [axis for axis, size in enumerate(result.shape) if size < 0]
    roots = tuple(root for size in step.sizes or () for root in size)
    if roots and len(unknown) == 1:
        return BatchKind({unknown[0]: roots}, learned=step.learned)
    return BatchKind({axis: (SampleCount(result, axis, axis == unknown[0]),) for axis in unknown}, learned=step.learned)


def _of_shape(step: Operation) -> BatchKind:
    """The kind of some of the sizes of a value."""
    sizes = step.kinds[0].sizes or ()
    if step.name == "slice" and len(step.sources) > 2:
        starts, ends = (integers(value) for value in step.sources[1:3])
        if starts and ends and len(starts) == 1:
            sizes = sizes[starts[0] : ends[0]]
    roots = tuple(root for each in sizes for root in each)
    if not any(root.of_batch for root in roots):
        return BatchKind(gathered=any(root.is_gathered for root in roots))
    if len(sizes) > 1 and step.name != "prod":
        return BatchKind(sizes=sizes)
    return BatchKind({}, 1, own=not all(root.is_static for root in roots), sizes=(roots,))
