"""LocalSGD: what the ranks' values become at the end of a period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fleet_train.plan.compression_settings import Array
from fleet_train.plan.local_sgd import LocalSgdSchedule
from fleet_train.plan.plan import by_mean_dtype
from fleet_train.plan.simulate.methods import cut
from fleet_train.plan.simulate.optimizers import NumpyOptimizer
from fleet_train.plan.simulate.wire import SimulatedWire
from fleet_train.profile import Profile

Values = dict[str, Array]


class SimulatedAveraging:
    """Values by name, one mapping per rank, changed in place. ``trained`` and ``statistics``: names, in plan order."""

    def __init__(
        self,
        profile: Profile,
        wire: SimulatedWire,
        start: Mapping[str, Array],
        trained: Sequence[str],
        others: list[str],
    ) -> None:
        self.schedule = LocalSgdSchedule.of(profile)
        self._profile, self._wire = profile, wire
        self._trained, self._statistics = list(trained), others
        self._anchor = _flats(start, self._trained)
        self._velocity = [np.zeros(anchor.shape) for anchor in self._anchor]
        self.overlap_steps = profile.local_sgd_overlap_steps
        self._corrections: list[Values] = []

    def after_synchronous_step(self, values: Mapping[str, Array]) -> None:
        """All ranks hold ``values``: a period that starts now is measured from there."""
        self._anchor = _flats(values, self._trained)

    def average(
        self, ranks: Sequence[Values], optimizers: Sequence[NumpyOptimizer], rate: float, losses: Sequence[float]
    ) -> None:
        """Make the ranks' parameters and statistics equal, treat the optimizers' state, start the next period.

        With an overlap only what each rank will add is worked out here.
        """
        if self.overlap_steps:
            self._send(ranks, rate)
            return
        self._agree([_flats(values, self._trained) for values in ranks], rate)
        for values in ranks:
            values.update(_cut(self._anchor, values, self._trained))
        self._mean(ranks, self._statistics)
        self._treat(optimizers)
        self.schedule.begin_period()
        if self.schedule.kind == "adaptive":
            self.schedule.adapt(rate, float(self._wire.mean([np.array([one], np.float32) for one in losses])[0]))

    def after_local_step(self, ranks: Sequence[Values]) -> None:
        """Add what an averaging has changed, once its overlap has passed."""
        if self._corrections and self.schedule.local_steps >= self.overlap_steps:
            for values, correction in zip(ranks, self._corrections, strict=True):
                changed = {name: values[name] + change for name, change in correction.items()}
                values.update({name: new.astype(values[name].dtype) for name, new in changed.items()})
            self._corrections = []

    def _send(self, ranks: Sequence[Values], rate: float) -> None:
        self._agree([_flats(values, self._trained) for values in ranks], rate)
        means = _cut(self._anchor, ranks[0], self._trained)
        tables = [{name: values[name] for name in self._statistics} for values in ranks]
        self._mean(tables, self._statistics)
        means |= tables[0]
        self._corrections = [{name: mean - values[name] for name, mean in means.items()} for values in ranks]
        self.schedule.begin_period()

    def _agree(self, held: Sequence[list[Array]], rate: float) -> None:
        """Move the anchor, one [elements] per dtype, to what all ranks go on from."""
        wire = self._profile.local_sgd_dtype
        for part, anchor in enumerate(self._anchor):
            values, own = [buffers[part] for buffers in held], anchor.dtype.name
            if self._profile.outer_optimizer == "none" and wire == "float32":
                self._anchor[part] = self._wire.mean(values, own)
                continue
            difference = self._wire.mean([anchor - one for one in values], own if wire == "float32" else wire)
            self._anchor[part] = (anchor - self._outer(part, difference.astype(np.float64), rate)).astype(own)

    def _outer(self, part: int, difference: Array, rate: float) -> Array:
        """The step from the anchor. SlowMo: Wang et al. 2019, algorithm 1. DiLoCo: Douillard et al. 2023, Nesterov."""
        lr, momentum, velocity = self._profile.outer_lr, self._profile.outer_momentum, self._velocity
        if self._profile.outer_optimizer == "slowmo":
            velocity[part] = momentum * velocity[part] + difference / rate
            return np.asarray(lr * rate * velocity[part])
        if self._profile.outer_optimizer == "diloco":
            velocity[part] = momentum * velocity[part] + difference
            return np.asarray(lr * (difference + momentum * velocity[part]))
        return difference

    def _mean(self, tables: Sequence[Values], names: Sequence[str]) -> None:
        parts = zip(*[_flats(table, names) for table in tables], strict=True)
        means = [self._wire.mean(list(part), part[0].dtype.name) for part in parts]
        for table in tables:
            table.update(_cut(means, table, names))

    def _treat(self, optimizers: Sequence[NumpyOptimizer]) -> None:
        kinds = sorted(optimizers[0].state)
        if self._profile.local_sgd_momentum == "average":
            joined = [
                {f"{kind} {name}": value for kind in kinds for name, value in one.state[kind].items()}
                for one in optimizers
            ]
            self._mean(joined, sorted(joined[0]))
            for optimizer, table in zip(optimizers, joined, strict=True):
                for kind in kinds:
                    optimizer.state[kind] = {name: table[f"{kind} {name}"] for name in optimizer.state[kind]}
        elif self._profile.local_sgd_momentum == "reset":
            for optimizer in optimizers:
                for kind in kinds:
                    optimizer.state[kind] = {n: np.zeros_like(value) for n, value in optimizer.state[kind].items()}


def _flats(values: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
    """One flat array for each dtype in which means are taken."""
    return [
        np.concatenate([np.ravel(values[name]).astype(dtype) for name in own])
        for dtype, own in _by_dtype(values, names).items()
    ]


def _cut(buffers: Sequence[Array], values: Mapping[str, Array], names: Sequence[str]) -> Values:
    """What ``_flats`` of these names became, by name."""
    found: Values = {}
    for buffer, own in zip(buffers, _by_dtype(values, names).values(), strict=True):
        found |= zip(own, cut(buffer.copy(), [values[name].shape for name in own]), strict=True)
    return found


def _by_dtype(values: Mapping[str, Array], names: Sequence[str]) -> dict[str, list[str]]:
    groups = by_mean_dtype([values[name].dtype.name for name in names])
    return {dtype: [names[i] for i in positions] for dtype, positions in groups.items()}
