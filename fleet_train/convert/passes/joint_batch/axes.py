"""Which dimensions of a value are samples of the batch, and where their number comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class SampleCount:
    """A number of elements that the feed decides: the size of dimension ``axis`` of ``value``; the elements of
    ``value`` that are not zero (``axis`` None); with ``weights``, the weights of the classes ``value`` but ``ignored``.
    ``is_alike``: whether a size that is in the program is in every rank's. ``is_gathered``: it counts all ranks'.
    """

    value: Any
    axis: int | None
    of_batch: bool = True
    weights: Any = None
    ignored: int | None = None
    is_alike: bool = True
    is_gathered: bool = False

    @property
    def is_fed(self) -> bool:
        """Whether the number is the number of samples that were fed."""
        maker = self.value.get_defining_op()
        return self.axis is not None and maker is not None and maker.name() == "pd_op.data"

    @property
    def is_in_program(self) -> bool:
        """Whether the number is the same in every step."""
        return self.axis is not None and self.value.shape[self.axis] >= 0

    @property
    def is_static(self) -> bool:
        """Whether the number is the same in every step, and on every rank."""
        return self.is_alike and self.is_in_program


def key_of(roots: Sequence[SampleCount]) -> tuple[Any, ...]:
    """A key that is equal for equal products of numbers. All that is fed has as many samples."""
    varying = [root for root in roots if not root.is_in_program] or roots
    return tuple(
        "samples" if root.is_fed and root.of_batch else (root.value.id, root.axis, root.weights is not None)
        for root in varying
    )


Axes = Mapping[int, tuple[SampleCount, ...]]
"""Dimensions of a value -> the numbers whose product is their size. Only samples, and what else the feed decides."""


def of_batch(axes: Axes) -> set[int]:
    """The dimensions that are samples."""
    return {axis for axis, roots in axes.items() if any(root.of_batch for root in roots)}


def are_gathered(several: Iterable[Axes]) -> bool:
    """Whether a dimension counts the samples of all ranks."""
    return any(root.is_gathered for axes in several for roots in axes.values() for root in roots)


def integers(value: Any) -> list[int] | None:
    """The constant integers that a value holds; None if it is computed."""
    operator = value.get_defining_op()
    if operator is None or operator.name() not in ("pd_op.full", "pd_op.full_int_array"):
        return None
    held = operator.attrs()["value"]
    return [int(number) for number in held] if isinstance(held, (list, tuple)) else [int(held)]


def constant(value: Any) -> float | None:
    """The number that a value holds; None if it is computed."""
    operator = value.get_defining_op()
    return float(operator.attrs()["value"]) if operator is not None and operator.name() == "pd_op.full" else None


def named_axes(operator: Any, sources: Sequence[Any]) -> set[int] | None:
    """The dimensions of its first operand that an operator names, by an attribute or its second operand; None if they
    are computed."""
    rank, axes = len(sources[0].shape), operator.attrs().get("axis")
    if axes is None:
        axes = integers(sources[1]) if len(sources) > 1 else []
    if axes is None:
        return None
    return {axis % rank for axis in ([axes] if isinstance(axes, int) else axes)} if rank else set()


def reduced_axes(operator: Any, name: str, sources: Sequence[Any]) -> set[int] | None:
    """The dimensions of its first operand that a reduction takes together, all if it names none; None if they are
    computed."""
    everything, attributes = set(range(len(sources[0].shape))), operator.attrs()
    if name in ("mean_all", "squared_l2_norm", "numel") or attributes.get("reduce_all") or attributes.get("asvector"):
        return everything
    named = named_axes(operator, sources)
    return None if named is None else named or everything


def carried(
    operator: Any, name: str, result: Any, sources: Sequence[Any], given: Sequence[Axes], reduced: set[int] | None
) -> dict[int, tuple[SampleCount, ...]]:
    """The axes of ``result``, of ``sources`` with the axes ``given``; ``reduced``: dimensions that a reduction took."""
    shape = list(result.shape)
    found = _moved(operator, name, result, sources, given, reduced)
    found = {axis: roots for axis, roots in found.items() if axis < len(shape)}
    batch_is_left = bool(of_batch(found))
    had_batch = any(of_batch(axes) for axes in given)
    for axis, size in enumerate(shape):
        if size < 0 and axis not in found and any(given):
            found[axis] = (SampleCount(result, axis, had_batch and not batch_is_left),)
            batch_is_left |= had_batch
    return found


def _moved(
    operator: Any, name: str, result: Any, sources: Sequence[Any], given: Sequence[Axes], reduced: set[int] | None
) -> dict[int, tuple[SampleCount, ...]]:
    first, before, shape = given[0], list(sources[0].shape), list(result.shape)
    if reduced is not None:
        left = {axis: roots for axis, roots in first.items() if axis not in reduced}
        return left if len(shape) == len(before) else _without(left, reduced)
    match name:
        case "transpose":
            return {place: first[axis] for place, axis in enumerate(operator.attrs()["perm"]) if axis in first}
        case "reshape" | "flatten" | "squeeze" | "unsqueeze":
            return _reshaped(before, shape, first)
        case "slice" | "strided_slice":
            gone = set(operator.attrs().get("decrease_axis", []))
            parted = (divided_axes(operator, name) or set()) - gone
            return _cut(result, _without(first, gone), [axis - sum(each < axis for each in gone) for axis in parted])
        case "split" | "split_with_num":
            divided = divided_axes(operator, name)
            return _cut(result, first, range(len(before)) if divided is None else divided)
        case "unbind" | "unstack":
            return _without(first, {operator.attrs()["axis"] % len(before)})
        case "concat":
            place = int(constant(sources[-1]) or 0) % len(shape)
            return _cut(result, _broadcast(sources[:-1], given[:-1], len(shape)), [place])
        case "stack":
            where = operator.attrs()["axis"] % len(shape)
            return {axis + (axis >= where): roots for axis, roots in _broadcast(sources, given, len(shape) - 1).items()}
        case "one_hot" | "embedding" | "sequence_mask":
            return dict(given[0])
        case "nonzero":
            return {0: (_chosen(sources[0], first),)}
        case "masked_select":
            return {0: (_chosen(sources[1], given[1]),)}
        case "gather" | "index_select":
            return _gathered(operator, sources, given)
        case "gather_nd":
            length = sources[1].shape[-1]
            index = {axis: roots for axis, roots in given[1].items() if axis < len(sources[1].shape) - 1}
            shift = len(sources[1].shape) - 1 - max(length, 0)
            return index | {axis + shift: roots for axis, roots in first.items() if axis >= length}
        case "matmul":
            return _multiplied(operator, shape, sources, given)
        case "expand" | "tile" | "expand_as" | "full_with_tensor":
            return _broadcast(sources[:1], given[:1], len(shape))
    if all(_broadcasts(list(source.shape), shape) for source in sources):
        return _broadcast(sources, given, len(shape))
    leading = [axes[0] for axes in given if 0 in axes]
    of_samples = [roots for roots in leading if any(root.of_batch for root in roots)]
    leads = next(iter(of_samples or leading), None)
    fits = shape and leads and (shape[0] < 0 or any(root.is_in_program for root in leads))
    return {0: leads} if leads and fits else {}


def divided_axes(operator: Any, name: str) -> set[int] | None:
    """The dimensions of its first operand of which an operator takes parts by their places; None if computed."""
    if name in ("slice", "strided_slice"):
        return {int(axis) for axis in operator.attrs()["axes"]}
    if name not in ("split", "split_with_num"):
        return set()
    place = constant(operator.operands_source()[-1])
    return None if place is None else {int(place) % len(operator.operand_source(0).shape)}


def _chosen(mask: Any, axes: Axes) -> SampleCount:
    """The number of elements that ``mask`` chooses."""
    return SampleCount(mask, None, bool(of_batch(axes)), is_gathered=are_gathered([axes]))


def _cut(result: Any, axes: Axes, where: Iterable[int]) -> dict[int, tuple[SampleCount, ...]]:
    """The batch dimensions of a part of a value: along the dimensions ``where`` it has a size of its own."""
    parts = dict(axes)
    for axis in axes.keys() & set(where):
        this, alike = {axis: axes[axis]}, all(root.is_alike for root in axes[axis])
        gathered = are_gathered([this])
        parts[axis] = (SampleCount(result, axis, bool(of_batch(this)), is_alike=alike, is_gathered=gathered),)
    return parts


def _without(axes: Axes, gone: set[int]) -> dict[int, tuple[SampleCount, ...]]:
    """The axes that are left where the dimensions ``gone`` are taken out."""
    return {axis - sum(each < axis for each in gone): roots for axis, roots in axes.items() if axis not in gone}


def _broadcasts(source: list[int], shape: list[int]) -> bool:
    aligned = zip(reversed(source), reversed(shape), strict=False)
    return len(source) <= len(shape) and all(size in (1, to) or min(size, to) < 0 for size, to in aligned)


def _broadcast(sources: Sequence[Any], given: Sequence[Axes], rank: int) -> dict[int, tuple[SampleCount, ...]]:
    found: dict[int, tuple[SampleCount, ...]] = {}
    for source, axes in zip(sources, given, strict=True):
        for axis, roots in axes.items():
            place = axis + rank - len(source.shape)
            if source.shape[axis] != 1 and (place not in found or not any(root.of_batch for root in found[place])):
                found[place] = roots
    return found


def _reshaped(before: list[int], shape: list[int], axes: Axes) -> dict[int, tuple[SampleCount, ...]]:
    unknown = [axis for axis in sorted(axes) if before[axis] < 0]
    places = [axis for axis, size in enumerate(shape) if size < 0]
    if unknown and len(places) == 1:
        return {places[0]: tuple(root for axis in unknown for root in axes[axis])}
    if unknown:
        return {place: axes[axis] for place, axis in zip(places, unknown, strict=False)}
    found: dict[int, tuple[SampleCount, ...]] = {}
    for axis, roots in axes.items():
        ahead, place, passed = math.prod(before[:axis]), 0, 1
        while place < len(shape) - 1 and (passed < ahead or shape[place] == 1 != before[axis]):
            passed *= shape[place]
            place += 1
        found[place] = (*found.get(place, ()), *roots)
    return found


def _gathered(operator: Any, sources: Sequence[Any], given: Sequence[Axes]) -> dict[int, tuple[SampleCount, ...]]:
    axis = operator.attrs().get("axis")
    if axis is None:
        axis = (integers(sources[2]) or [0])[0] if len(sources) > 2 else 0
    width = len(sources[1].shape)
    found = {axis + place: roots for place, roots in given[1].items()}
    for place, roots in given[0].items():
        if place != axis:
            found[place if place < axis else place + width - 1] = roots
    return found


def _multiplied(
    operator: Any, shape: list[int], sources: Sequence[Any], given: Sequence[Axes]
) -> dict[int, tuple[SampleCount, ...]]:
    """The batch dimensions of a matrix product: the leading ones of both, the first's rows, the second's columns."""
    found: dict[int, tuple[SampleCount, ...]] = {}
    for source, axes, contracted in zip(sources[:2], given[:2], contracted_axes(operator, sources), strict=True):
        rank = len(source.shape)
        kept = {contracted, rank - 1, rank - 2} if rank > 1 else {contracted}
        for axis, roots in axes.items():
            if axis == contracted:
                continue
            place = axis + len(shape) - rank
            if axis in kept and rank > 1:
                place = len(shape) - (1 if source is sources[1] else 2)
                if len(shape) < max(len(each.shape) for each in sources[:2]):
                    place = len(shape) - 1
            found.setdefault(place, roots)
    return found


def contracted_axes(operator: Any, sources: Sequence[Any]) -> tuple[int, int]:
    """The dimension of each factor over which a matrix product sums."""
    attributes, (first, second) = operator.attrs(), (len(source.shape) for source in sources[:2])
    return (
        first - 2 if attributes["transpose_x"] and first > 1 else first - 1,
        second - 1 if attributes["transpose_y"] or second == 1 else second - 2,
    )
