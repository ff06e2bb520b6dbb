"""Finds what in a loss is a sum over the batch instead of a mean.

Ranks average gradients: of a mean over each rank's share of the batch that is the gradient of the joint batch, of a sum
it is an N-th. A value is known by its degrees: how each of its terms grows with the number of samples (0: a value per
sample or a mean, 1: a sum or a count, -1: one over a count). The batch is the unknown (-1) first dimension of inputs.
What cannot be decided has the degree None, and is never accused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet_train.convert.passes.joint_batch.axes import constant, integers
from fleet_train.convert.passes.program import inputs_of, operators_behind

Degrees = dict[float | None, Any]
"""Degree -> the operator that made a sum of it, or None. Empty: the value does not depend on the batch."""

# Several dimensions are unknown and some of them are summed: 1 if the batch is among these, else 0.
_PARTLY = 0.5
_UNKNOWN: Degrees = {None: None}
_SAME = ("scale", "cast", "reshape", "transpose", "squeeze", "unsqueeze", "flatten", "assign", "share_data")
_SUMS = ("add", "subtract", "add_n", "concat", "stack", "combine", "maximum", "minimum", "clip")
# Weights of terms are seldom as small and as round as one over such a number, which may count samples.
_LEAST_COUNT = 4


def remark_on_batch_sum(loss: Any, world_size: int, accumulate_steps: int) -> str:
    """Rank 0's sentence on a sum over the batch that is a term of ``loss``; empty if there is none."""
    parts = world_size * accumulate_steps
    place = sum_over_batch(loss, parts) if parts > 1 else ""
    if not place:
        return ""
    of = " x ".join(
        [f"{world_size} ranks"] * (world_size > 1) + [f"{accumulate_steps} micro-batches"] * (accumulate_steps > 1)
    )
    return (
        f"the loss has a sum over the batch ({place}): the gradients of {of} are averaged, so this sum "
        f"trains with 1/{parts} of the gradient that one process has for the joint batch; use a mean over the batch "
        f"(paddle.mean), or multiply the sum by {parts}"
    )


def sum_over_batch(loss: Any, parts: int) -> str:
    """Which operator makes a sum over the batch that is a term of ``loss``: its line in the script, and its name. Empty
    if there is none, it cannot be decided, or it is multiplied by ``parts``, the number of shares that are averaged."""
    known: dict[int, Degrees] = {}
    for operator in operators_behind(loss):
        for result in operator.results():
            if result.initialized():
                known[result.id] = _degrees(operator, result, known, parts)
    degrees = known.get(loss.id, {})
    return _line_of(degrees[1]) if 1 in degrees else ""


def _line_of(operator: Any) -> str:
    """The line of the script that made an operator, and its name."""
    frames = _attribute(operator, "op_callstack") or []
    lines = [frame.strip() for frame in frames if frame.strip().startswith("File ")]
    own = [line for line in lines if "/paddle/" not in line.replace("\\", "/")] or lines
    return ", ".join([*own[-1:], _short(operator)])


def _degrees(operator: Any, result: Any, known: dict[int, Degrees], parts: int) -> Degrees:
    name, sources = _short(operator), inputs_of(operator)
    if name == "data":
        return _of_input(result)
    given = [known.get(source.id, _UNKNOWN) for source in sources]
    if operator.num_regions() or not operator.name().startswith(("pd_op.", "builtin.")):
        return _UNKNOWN
    if not any(given):
        return {}
    if name in ("shape", "shape64", "numel"):
        return {1: operator} if _unknown_axes(sources[0]) == 1 else _UNKNOWN
    if name in ("sum", "mean", "mean_all"):
        return _reduced(operator, sources, given[0], is_sum=name == "sum")
    if name == "squared_l2_norm":
        return _summed(operator, _only_per_sample(given), _unknown_axes(sources[0]), _unknown_axes(sources[0]))
    if name in ("multiply", "divide", "scale") and len(sources) > 1:
        if (factor := constant(sources[1])) is not None:
            return _weighed(given[0], factor if name != "divide" else 1 / (factor or 1.0), parts)
        return _product(given[0], given[1], divided=name == "divide")
    if name == "slice" and _short(sources[0].get_defining_op()) in ("shape", "shape64"):
        return _of_size(operator, sources)
    if name == "matmul":
        return _multiplied_out(operator, sources, given)
    if name in _SUMS:
        return _added(result, sources, given)
    if name in _SAME and not _loses_axes(sources[:1], result, exactly=None not in given[0] and _PARTLY in given[0]):
        return given[0]
    reduction = _attribute(operator, "reduction")
    if reduction in ("mean", "sum"):
        of_samples, unknown = _only_per_sample(given), max(map(_unknown_axes, sources))
        return of_samples if reduction == "mean" else _summed(operator, of_samples, unknown, unknown)
    if _loses_axes(sources, result) or _works_along_batch(operator, sources):
        return _UNKNOWN
    return _only_per_sample(given)


def _of_input(value: Any) -> Degrees:
    shape = list(value.shape)
    if value.persistable:
        return {}
    if all(size == 1 for size in shape):
        return _UNKNOWN  # a fed number may count the samples
    return {0: None} if shape and shape[0] < 0 else _UNKNOWN


def _of_size(operator: Any, sources: Sequence[Any]) -> Degrees:
    """An element of a shape: the size of one dimension."""
    shape = sources[0].get_defining_op().operand_source(0).shape
    starts, ends = (integers(source) for source in sources[1:3])
    if starts is None or ends is None or len(starts) != 1:
        return _UNKNOWN
    sizes = list(shape)[starts[0] : ends[0]]
    if all(size >= 0 for size in sizes):
        return {}
    return {1: operator} if len(sizes) == 1 and sum(size < 0 for size in shape) == 1 else _UNKNOWN


def _reduced(operator: Any, sources: Sequence[Any], given: Degrees, *, is_sum: bool) -> Degrees:
    shape = list(sources[0].shape)
    axes = integers(sources[1]) if len(sources) > 1 else _attribute(operator, "axis") or []
    if axes is None:
        return _UNKNOWN
    axes = axes or list(range(len(shape)))
    reduced = sum(shape[axis] < 0 for axis in {axis % len(shape) for axis in axes}) if shape else 0
    unknown = _unknown_axes(sources[0])
    if not reduced:
        return given
    if is_sum:
        return _summed(operator, given, reduced, unknown)
    return {(None if degree == _PARTLY else degree): origin for degree, origin in given.items()}


def _summed(operator: Any, given: Degrees, reduced: int, unknown: int) -> Degrees:
    """``reduced`` of ``unknown`` dimensions of unknown size are summed."""
    degrees: Degrees = {}
    for degree in given:
        if not reduced:
            degrees[degree] = given[degree]
        elif degree is None:
            degrees[None] = None
        elif reduced == unknown:
            degrees[1 if degree == _PARTLY else degree + 1] = operator
        else:
            degrees[_PARTLY if degree == 0 else None] = operator
    return degrees


def _weighed(given: Degrees, factor: float, parts: int) -> Degrees:
    """Times a constant. A sum is left undecided if this is the number of shares, or one over what may count samples."""
    inverse = 1 / abs(factor) if factor else 0.0
    counts = inverse >= _LEAST_COUNT and abs(inverse - round(inverse)) < 1e-4 * inverse
    if counts or factor == parts:
        return {(None if degree else degree): origin for degree, origin in given.items()}
    return given


def _product(first: Degrees, second: Degrees, *, divided: bool) -> Degrees:
    if divided and len(second) > 1:
        return _UNKNOWN
    degrees: Degrees = {}
    for left, left_origin in (first or {0: None}).items():
        for right, right_origin in (second or {0: None}).items():
            degrees[_total(left, right, -1 if divided else 1)] = left_origin or right_origin
    return degrees


def _total(left: float | None, right: float | None, sign: int) -> float | None:
    if left is None or right is None:
        return None
    total = left + sign * right
    if left == right == _PARTLY and sign > 0:
        return None
    return total if total == _PARTLY or total == int(total) else None


def _multiplied_out(operator: Any, sources: Sequence[Any], given: Sequence[Degrees]) -> Degrees:
    """A matrix product, which sums over the dimension that its factors share."""
    shape, attributes = list(sources[0].shape), operator.attrs()
    contracted = shape[-2] if attributes["transpose_x"] and len(shape) > 1 else shape[-1]
    degrees = _product(given[0], given[1], divided=False)
    return _summed(operator, degrees, 1, _unknown_axes(sources[0])) if contracted < 0 else degrees


def _added(result: Any, sources: Sequence[Any], given: Sequence[Degrees]) -> Degrees:
    """The terms of all; of numbers for the whole batch, without those that have no gradient if others have one."""
    degrees: Degrees = {}
    is_number = result.is_dense_tensor_type() and not _unknown_axes(result) and not result.stop_gradient
    for source, own in zip(sources, given, strict=True):
        if not (is_number and source.is_dense_tensor_type() and source.stop_gradient):
            degrees |= own
    return degrees


def _only_per_sample(given: Sequence[Degrees]) -> Degrees:
    return {0: None} if all(degree == 0 for degrees in given for degree in degrees) else _UNKNOWN


def _loses_axes(sources: Sequence[Any], result: Any, exactly: bool = False) -> bool:
    """Whether ``result`` has no dimension of unknown size left; ``exactly``: or fewer of them."""
    before, after = max(map(_unknown_axes, sources)), _unknown_axes(result)
    return result.is_dense_tensor_type() and (after < before if exactly else before > 0 == after)


def _works_along_batch(operator: Any, sources: Sequence[Any]) -> bool:
    """Whether it computes along a dimension of unknown size, as a softmax over the samples does."""
    axis, shape = _attribute(operator, "axis"), list(sources[0].shape) if sources[0].is_dense_tensor_type() else []
    return isinstance(axis, int) and -len(shape) <= axis < len(shape) and shape[axis] < 0


def _unknown_axes(value: Any) -> int:
    return sum(size < 0 for size in value.shape) if value.is_dense_tensor_type() else 0


def _attribute(operator: Any, name: str) -> Any:
    """None if it has none. Paddle cannot read the attributes of every operator."""
    return operator.attrs()[name] if operator.has_attr(name) else None


def _short(operator: Any) -> str:
    return str(operator.name()).rpartition(".")[2].rstrip("_")
