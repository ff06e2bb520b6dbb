"""Rules for operators on numbers of the batch: which must read the joint batch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleet_train.convert.passes.joint_batch.axes import Root, constant, integers
from fleet_train.convert.passes.joint_batch.kinds import (
    ADDS,
    CHOOSES,
    COLLECTS,
    CONSTANT,
    CONSTANTS_LIKE,
    MOVES,
    SIZED_BY,
    Findings,
    Kind,
    Operand,
    Step,
    Use,
    difference,
    is_float,
    total,
)

# Weights of terms are seldom as small and as round as one over such a number, which may count samples.
_LEAST_COUNT = 4


class Numbers:
    """Notes in ``found`` what operators on numbers are to read."""

    def __init__(self, shares: int, batch: int | None) -> None:
        """``shares``: what gradients are averaged over. ``batch``: the number of samples, if it is in the program."""
        self.found = Findings()
        self._shares, self._batch = shares, batch

    def result_of(self, step: Step) -> Kind:
        """The kind of the results of an operator without operands that are per sample."""
        name, kinds = step.name, step.kinds
        if name in CONSTANTS_LIKE:
            return CONSTANT
        if name in SIZED_BY and any(size < 0 for size in step.operator.result(0).shape):
            return _of_size(step)
        if kinds[0].sizes is not None and not kinds[0].own:
            return _of_shape(step)
        if step.sizes is not None and not all(map(is_float, step.operator.results())):
            return self._of_sizes(step)
        own = any(kind.own for kind in kinds)
        result = Kind({}, kinds[0].degree, own=own, learned=step.learned, shared=step.is_shared)
        if name == "multiply":
            return self._product(step)
        if name == "divide":
            return self._quotient(step)
        if name == "scale":
            return self._scaled(step)
        if name in ADDS or name in COLLECTS:
            return replace(result, degree=self.one_degree(step))
        if name == "cast" and own:
            return self._cast(step, result)
        if name in MOVES or name.startswith("builtin."):
            return result
        return self._nonlinear(step)

    def _nonlinear(self, step: Step) -> Kind:
        for operand, kind in zip(step.operands, step.kinds, strict=True):
            if kind.own:
                self.join(operand, kind)
        own = any(kind.own for kind in step.kinds)
        joined = Kind(learned=step.learned, shared=step.learned and (own or step.is_shared))
        first = int(step.name == "where")
        if step.name in CHOOSES and all(map(is_float, step.sources[first:])):
            return replace(joined, degree=self.one_degree(step, first))
        self.to_joint(step)
        return replace(joined, degree=0 if total(kind.degree for kind in step.kinds) is not None else None)

    def _cast(self, step: Step, result: Kind) -> Kind:
        if is_float(step.sources[0]) and not is_float(step.operator.result(0)):
            return self._nonlinear(step)
        if result.degree is None and step.kinds[0].sizes is not None:
            self.found.undecided.append((step.operator, "how this number grows with the batch is not known"))
        return result

    def _of_sizes(self, step: Step) -> Kind:
        """Integers that are computed of sizes: they stay this rank's, because they may be sizes again."""
        degree = total(kind.degree for kind in step.kinds) if step.name == "multiply" else None
        if step.name in MOVES:
            degree = step.kinds[0].degree
        own = any(kind.own for kind in step.kinds)
        return Kind({}, degree, own=own, learned=step.learned, sizes=step.sizes)

    def _product(self, step: Step) -> Kind:
        first, second = step.kinds
        if first.own and second.own:
            place = 0 if second.learned and not first.learned else 1
            self.join(step.operands[place], step.kinds[place])
        elif first.own or second.own:
            self._join_fed(step)
        own = first.own or second.own
        return Kind({}, total((first.degree, second.degree)), own=own, learned=step.learned, shared=step.is_shared)

    def _quotient(self, step: Step) -> Kind:
        first, second = step.kinds
        if second.own:
            self.join(step.operands[1], second)
        elif first.own:
            self._join_fed(step)
        if second.fed:  # it counts samples, as the sum that it divides does
            return Kind({}, 0 if first.degree == 1 else None, own=first.own, learned=step.learned)
        shared = step.is_shared or (second.own and second.learned)
        return Kind({}, difference(first, second), own=first.own, learned=step.learned, shared=shared)

    def _join_fed(self, step: Step) -> None:
        """Ranks may feed unlike numbers, of their own batch, or one number, of the joint batch."""
        for operand, kind in zip(step.operands, step.kinds, strict=True):
            if kind.fed and is_float(operand.value):
                self.join(operand, kind)

    def _scaled(self, step: Step) -> Kind:
        """Times a constant, plus a constant."""
        kind, operator = replace(step.kinds[0], learned=step.learned), step.operator
        factor = constant(step.sources[1]) if len(step.sources) > 1 else None
        if kind.degree and operator.attrs()["bias"]:
            if kind.own and not step.learned:  # so that it is sent early
                self.join(step.operands[0], kind)
                kind = replace(kind, own=False)
            self.found.biases[operator.id()] = kind.degree or 0
        return kind if factor is None or kind.degree != 1 else self._counted(operator, kind, factor)

    def _counted(self, operator: Any, kind: Kind, factor: float) -> Kind:
        """A sum over the batch times a constant, which may be one over a number of samples, or the number of shares."""
        inverse = 1 / abs(factor) if factor else 0.0
        is_whole = inverse >= _LEAST_COUNT and abs(inverse - round(inverse)) < 1e-4 * inverse
        if factor == self._shares and kind.learned:
            self.found.assumed.append((operator, f"the number of shares, {factor:g}, that this sum is spread over"))
            return replace(kind, degree=0)
        if not is_whole or (self._batch and round(inverse) % self._batch):
            return kind
        self.found.has_fixed_counts = True
        if self._batch is None and kind.learned:
            self.found.assumed.append((operator, f"one over the number of samples of a rank, {round(inverse)}"))
        return replace(kind, degree=0 if kind.learned else None)

    def one_degree(self, step: Step, first: int = 0) -> int | None:
        """Bring numbers that are added or compared to the highest degree among them; returns it."""
        degrees = [kind.degree for kind in step.kinds[first:]]
        known = [degree for degree in degrees if degree is not None]
        if len(known) < len(degrees) or not all(map(is_float, step.sources[first:])):
            return degrees[0] if len(set(degrees)) == 1 else None
        highest = max(known)
        for operand, degree in zip(step.operands[first:], known, strict=True):
            if degree != highest:
                self.found.uses.append(Use(operand, power=degree - highest))
        return highest

    def shifted(self, step: Step) -> int | None:
        """Samples plus a constant."""
        degree = step.kinds[0].degree
        if degree:
            self.found.biases[step.operator.id()] = degree
        return degree

    def to_joint(self, step: Step) -> None:
        """Let an operator read the joint batch's numbers themselves."""
        for operand, kind in zip(step.operands, step.kinds, strict=True):
            if kind.degree and not (kind.own and not is_float(operand.value)):  # an integer is joined to its sum
                self.found.uses.append(Use(operand, power=kind.degree))

    def join(self, operand: Operand, kind: Kind, *, back: bool = False) -> None:
        """Let an operand be the mean over ranks."""
        is_joined = kind.own or kind.fed
        self.found.uses.append(Use(operand, is_joined, back and kind.learned, kind.learned))


def _of_size(step: Step) -> Kind:
    """As many elements as a number of the batch says."""
    result = step.operator.result(0)
    unknown = [axis for axis, size in enumerate(result.shape) if size < 0]
    roots = tuple(root for size in step.sizes or () for root in size)
    if roots and len(unknown) == 1:
        return Kind({unknown[0]: roots}, learned=step.learned)
    return Kind({axis: (Root(result, axis, axis == unknown[0]),) for axis in unknown}, learned=step.learned)


def _of_shape(step: Step) -> Kind:
    """Some of the sizes of a value."""
    sizes = step.kinds[0].sizes or ()
    if step.name == "slice" and len(step.sources) > 2:
        starts, ends = (integers(value) for value in step.sources[1:3])
        if starts and ends and len(starts) == 1:
            sizes = sizes[starts[0] : ends[0]]
    roots = tuple(root for each in sizes for root in each)
    if not any(root.of_batch for root in roots):
        return CONSTANT
    if len(sizes) > 1 and step.name != "prod":
        return Kind(sizes=sizes)
    return Kind({}, 1, own=not all(root.is_static for root in roots), sizes=(roots,))
