"""Parameters that LocalSGD averages together: the last agreed values, and how differences are sent.

They are averaged as flat buffers, one for each dtype in which means are computed (`flats`): float64 for float64,
float32 for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import paddle

from fleet_train.collectives.engine import Stages
from fleet_train.collectives.methods.dense import Allreduce, flatten, views
from fleet_train.collectives.methods.quantised import KeptErrors, QuantisedSums, RoundedSum
from fleet_train.collectives.paddle_compat import as_dtype
from fleet_train.plan import Bucket, TensorSpec
from fleet_train.plan.plan import Averaging, by_mean_dtype, mean_dtype
from fleet_train.profile import Profile
from fleet_train.profile.methods.outer import outer_optimizer_of

T = TypeVar("T")


class Fragment:
    """Some of the parameters, or all of them; buffers are their `flats`.

    ``positions``: in the plan's list of averaged parameters. ``is_last``: of a period.
    """

    def __init__(
        self,
        profile: Profile,
        averaging: Averaging,
        index: int,
        world_size: int,
        allreduce: Allreduce,
        sums: QuantisedSums | None,
    ) -> None:
        self.index = index
        self.positions = averaging.parts[index]
        self.is_last = index == len(averaging.parts) - 1
        self.values: list[TensorSpec] = [averaging.values[position] for position in self.positions]
        self._outer = outer_optimizer_of(profile.outer_optimizer)
        self._outer_settings = profile.outer_lr, profile.outer_momentum
        self.velocity: list[Any] | None = None
        """The outer momentum, as the anchor; None before the first averaging and without an outer optimizer."""
        self.anchor: list[Any] | None = None
        """The values of all ranks after the last averaging, if kept."""
        self.keeps_anchor = profile.outer_optimizer != "none" or profile.local_sgd_dtype != "float32"
        self._in_16_bits = profile.local_sgd_dtype == "bfloat16"
        self._allreduce = allreduce
        self._world_size = world_size
        self._rounded: list[tuple[list[TensorSpec], RoundedSum]] = []
        if sums is not None and averaging.quantised is not None:
            for group in _groups_of(self.values):
                elements = sum(value.elements for value in group)
                self._rounded.append(
                    (group, sums.make(0, f"averaged {index}.{len(self._rounded)}", elements, averaging.quantised))
                )

    def choose(self, items: Sequence[T]) -> list[T]:
        """The items of a list over all averaged parameters that belong to this fragment."""
        return [items[position] for position in self.positions]

    def remember(self, parameters: Sequence[Any]) -> None:
        """Called when all ranks hold ``parameters`` (of the whole job's list)."""
        if self.keeps_anchor:
            self.anchor = flats(self.choose(parameters))

    def zeros(self) -> list[Any]:
        """Buffers like the anchor, of zeros."""
        assert self.anchor is not None
        return [paddle.zeros_like(buffer) for buffer in self.anchor]

    @property
    def memories(self) -> list[tuple[Bucket, KeptErrors]]:
        """The rounding errors, with the parameters that they belong to."""
        return [
            (Bucket(self.index, tuple(group), 0), KeptErrors("local_sgd", group, rounded_sum.rounded))
            for group, rounded_sum in self._rounded
        ]

    def agree(
        self, values: list[Any], rate: float, extras: Sequence[Any] = (), more: bool = False
    ) -> Stages[tuple[list[Any], list[Any]]]:
        """The values to continue from after an averaging of ``values``, and the means of the buffers ``extras``.

        Overwrites ``extras``, and ``values`` unless ``keeps_anchor``. ``rate``: the inner optimizer's learning rate.
        """
        sent = self._differences(values) if self.keeps_anchor else values
        sums, others = yield from self._sums_of(sent, extras, more)
        means = [self._mean(*pair) for pair in zip(sums, values, strict=True)]
        others = [self._mean(*pair) for pair in zip(others, extras, strict=True)]
        if not self.keeps_anchor:
            return means, others
        assert self.anchor is not None
        self._step_from_anchor(means, rate)
        return self.anchor, others

    def _step_from_anchor(self, differences: list[Any], rate: float) -> None:
        """Move the anchor, in its own memory, by the outer optimizer's step; all ranks compute the same bits."""
        assert self.anchor is not None
        velocities = self.velocity or [None] * len(differences)
        for index, (anchor, difference) in enumerate(zip(self.anchor, differences, strict=True)):
            change, velocity = self._outer.step(difference, velocities[index], rate, *self._outer_settings)
            anchor.subtract_(change)
            velocities[index] = velocity
        self.velocity = None if velocities[0] is None else velocities

    def _differences(self, values: list[Any]) -> list[Any]:
        """What is sent for ``values``: their difference from the last agreed values."""
        assert self.anchor is not None
        differences = [anchor - buffer for anchor, buffer in zip(self.anchor, values, strict=True)]
        return [difference.cast("bfloat16") for difference in differences] if self._in_16_bits else differences

    def _sums_of(self, sent: list[Any], extras: Sequence[Any], more: bool) -> Stages[tuple[list[Any], list[Any]]]:
        if not self._rounded:
            sums = yield from self._allreduce.sum([*sent, *extras], more)
            return sums[: len(sent)], sums[len(sent) :]
        totals: list[Any] = []
        for (_, rounded_sum), buffer in zip(self._rounded, sent, strict=True):
            is_end = len(totals) == len(sent) - 1 and not extras
            totals += yield from rounded_sum.allreduce.sum([as_dtype(buffer, "float32")], more or not is_end)
        if not extras:
            return totals, []
        others = yield from self._allreduce.sum(list(extras), more)
        return totals, others

    def _mean(self, total: Any, like: Any) -> Any:
        """The mean of all ranks, from their sum ``total``, in the dtype of ``like``. Not scaled in bfloat16: 1/3 also
        has 8 bits there, and every mean of three ranks would be 0.2 % too large."""
        total = total if total.dtype == like.dtype else total.cast(like.dtype)
        return total.scale_(1.0 / self._world_size)


def _groups_of(values: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Values by the dtype of their mean, as `flats` has them in one buffer each."""
    return [[values[i] for i in positions] for positions in by_mean_dtype([v.dtype for v in values]).values()]


def joined(fragments: Sequence[Fragment], buffers: Sequence[list[Any]]) -> list[Any]:
    """The fragments' ``buffers``, one list each, as `flats` of all parameters in the plan's order."""
    if len(fragments) == 1:
        return buffers[0]
    parts: dict[int, Any] = {}
    for fragment, own in zip(fragments, buffers, strict=True):
        parts |= zip(fragment.positions, cut(own, fragment.values), strict=True)
    return flats([parts[position] for position in sorted(parts)])


def parted(fragments: Sequence[Fragment], buffers: list[Any], values: Sequence[TensorSpec]) -> list[list[Any]]:
    """The reverse of ``joined``: the fragments' own buffers."""
    if len(fragments) == 1:
        return [buffers]
    parts = cut(buffers, values)
    return [flats(fragment.choose(parts)) for fragment in fragments]


def flats(tensors: Sequence[Any]) -> list[Any]:
    """Copies of eager tensors, one flat buffer for each dtype in which a mean is computed, in the order of
    ``MEAN_DTYPES``."""
    groups = _groups(tensors)
    return [flatten([as_dtype(tensors[index], name) for index in groups[name]]) for name in groups]


def cut(buffers: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Views of the values of ``flats(tensors)``, in the order and shapes of ``tensors``."""
    parts: list[Any] = [None] * len(tensors)
    for buffer, indices in zip(buffers, _groups(tensors).values(), strict=True):
        for index, part in zip(indices, views(buffer, [tensors[index].shape for index in indices]), strict=True):
            parts[index] = part
    return parts


def write(tensors: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Put flat values into tensors, in place: the scope's variables share their memory."""
    for tensor, part in zip(tensors, cut(buffers, tensors), strict=True):
        paddle.assign(part if part.dtype == tensor.dtype else part.cast(tensor.dtype), output=tensor)


def add(tensors: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Add flat values to tensors, in place."""
    for tensor, part in zip(tensors, cut(buffers, tensors), strict=True):
        total = as_dtype(tensor, mean_dtype(_dtype_of(tensor))) + part
        paddle.assign(total if total.dtype == tensor.dtype else total.cast(tensor.dtype), output=tensor)


def _groups(tensors: Sequence[Any]) -> dict[str, list[int]]:
    return by_mean_dtype([_dtype_of(tensor) for tensor in tensors])


def _dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]
