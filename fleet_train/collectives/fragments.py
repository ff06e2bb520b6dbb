"""Parameters that LocalSGD averages together: the last agreed values, and how differences are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import paddle

from fleet_train.collectives.engine import Stages
from fleet_train.collectives.methods.dense import Allreduce, flatten, views
from fleet_train.collectives.methods.quantised_sum import Carried, KeptErrors, QuantisedSums
from fleet_train.collectives.paddle_compat import as_dtype
from fleet_train.plan import Bucket, TensorSpec
from fleet_train.plan.plan import Averaging, by_mean_dtype, mean_dtype
from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of

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
        self.outer = OuterOptimizer(profile)
        self.anchor: list[Any] | None = None
        """The values of all ranks after the last averaging, if kept."""
        self.keeps_anchor = profile.outer_optimizer != "none" or profile.local_sgd_dtype != "float32"
        self._in_16_bits = profile.local_sgd_dtype == "bfloat16"
        self._allreduce = allreduce
        self._world_size = world_size
        self._rounded: list[tuple[list[TensorSpec], Carried]] = []
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
            (Bucket(self.index, tuple(group), 0), KeptErrors("local_sgd", group, carried.rounded))
            for group, carried in self._rounded
        ]

    def agree(
        self, values: list[Any], rate: float, beside: Sequence[Any] = (), more: bool = False
    ) -> Stages[tuple[list[Any], list[Any]]]:
        """The values to continue from after an averaging of ``values``, and the means of the buffers ``beside``.

        Overwrites ``beside``, and ``values`` unless ``keeps_anchor``. ``rate``: the inner optimizer's learning rate.
        """
        sent = self._differences(values) if self.keeps_anchor else values
        sums, others = yield from self._sums_of(sent, beside, more)
        means = [self._mean(*pair) for pair in zip(sums, values, strict=True)]
        others = [self._mean(*pair) for pair in zip(others, beside, strict=True)]
        if not self.keeps_anchor:
            return means, others
        assert self.anchor is not None
        self.anchor = self.outer.step(self.anchor, means, rate)
        return self.anchor, others

    def _differences(self, values: list[Any]) -> list[Any]:
        """What is sent for ``values``: their difference from the last agreed values."""
        assert self.anchor is not None
        differences = [anchor - buffer for anchor, buffer in zip(self.anchor, values, strict=True)]
        return [difference.cast("bfloat16") for difference in differences] if self._in_16_bits else differences

    def _sums_of(self, sent: list[Any], beside: Sequence[Any], more: bool) -> Stages[tuple[list[Any], list[Any]]]:
        if not self._rounded:
            sums = yield from self._allreduce.sum([*sent, *beside], more)
            return sums[: len(sent)], sums[len(sent) :]
        totals: list[Any] = []
        for (_, carried), buffer in zip(self._rounded, sent, strict=True):
            is_end = len(totals) == len(sent) - 1 and not beside
            totals += yield from carried.sums.sum([as_dtype(buffer, "float32")], more or not is_end)
        if not beside:
            return totals, []
        others = yield from self._allreduce.sum(list(beside), more)
        return totals, others

    def _mean(self, total: Any, like: Any) -> Any:
        """Not scaled in bfloat16: 1/3 also has 8 bits there, and every mean of three ranks would be 0.2 % too large."""
        total = total if total.dtype == like.dtype else total.cast(like.dtype)
        return total.scale_(1.0 / self._world_size)


def _groups_of(values: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """The values of each of their `flats`."""
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


# Momentum over periods of local training: the outer optimizer, which uses the averaged difference.


class OuterOptimizer:
    """Turns the last agreed values and the averaged difference (anchor - average) into the next agreed values.

    ``none``: anchor - difference, plain averaging.
    ``slowmo``: u = m u + difference / rate; anchor - lr * rate * u (Wang, Tantia, Ballas and Rabbat 2019).
    ``diloco``: u = m u + difference; anchor - lr * (difference + m u), Nesterov (Douillard et al. 2023).
    Tensors are flat, [elements], one for each dtype in which means are computed, and equal on every rank.
    """

    def __init__(self, profile: Profile) -> None:
        steps: dict[str, Callable[[list[Any], list[Any], float], list[Any]]]
        steps = {"none": self._plain, "slowmo": self._slowmo, "diloco": self._diloco}
        self._step = entry_of("outer_optimizer", profile.outer_optimizer, steps, "step on real ranks")
        self._lr = profile.outer_lr
        self._momentum = profile.outer_momentum
        self.velocity: list[Any] | None = None

    def step(self, anchor: list[Any], difference: list[Any], rate: float) -> list[Any]:
        """The next agreed values, in the memory of ``anchor``; ``difference`` is overwritten or kept as well.

        ``rate`` is the inner optimizer's learning rate.
        """
        return self._step(anchor, difference, rate)

    def _plain(self, anchor: list[Any], difference: list[Any], _: float) -> list[Any]:
        return [a.subtract_(d) for a, d in zip(anchor, difference, strict=True)]

    def _slowmo(self, anchor: list[Any], difference: list[Any], rate: float) -> list[Any]:
        scale = 1.0 / rate if rate > 0 else 1.0
        velocity = self._push([d.scale_(scale) for d in difference] if scale != 1.0 else difference)
        return [a.subtract_(v * (self._lr / scale)) for a, v in zip(anchor, velocity, strict=True)]

    def _diloco(self, anchor: list[Any], difference: list[Any], _: float) -> list[Any]:
        steps = [p.add_(v * self._momentum) for p, v in zip(difference, self._push(difference), strict=True)]
        return [a.subtract_(one.scale_(self._lr)) for a, one in zip(anchor, steps, strict=True)]

    def _push(self, pushed: list[Any]) -> list[Any]:
        """Add to the velocity and return it."""
        if self.velocity is None:
            self.velocity = [p.clone() for p in pushed]
        else:
            self.velocity = [v.scale_(self._momentum).add_(p) for v, p in zip(self.velocity, pushed, strict=True)]
        return self.velocity


# Tensors of several dtypes as flat buffers: one for each dtype in which means are computed.
#
# Means of float64 are computed in float64, all others in float32.


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
