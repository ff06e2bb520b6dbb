"""LocalSGD: what the ranks' values become at the end of a period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fleet_train.plan.compression_settings import Array
from fleet_train.plan.local_sgd import LocalSgdSchedule
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
        self._anchor = _flat(start, self._trained)
        self._velocity = np.zeros(self._anchor.shape)
        self.overlap_steps = profile.local_sgd_overlap_steps
        self._corrections: list[Values] = []

    def after_synchronous_step(self, values: Mapping[str, Array]) -> None:
        """All ranks hold ``values``: a period that starts now is measured from there."""
        self._anchor = _flat(values, self._trained)

    def average(
        self, ranks: Sequence[Values], optimizers: Sequence[NumpyOptimizer], rate: float, losses: Sequence[float]
    ) -> None:
        """Make the ranks' parameters and statistics equal, treat the optimizers' state, start the next period.

        With an overlap only what each rank will add is worked out here.
        """
        if self.overlap_steps:
            self._send(ranks, rate)
            return
        self._agree([_flat(values, self._trained) for values in ranks], rate)
        shapes = [ranks[0][name].shape for name in self._trained]
        for values in ranks:
            values.update(zip(self._trained, cut(self._anchor.copy(), shapes), strict=True))
        self._mean(ranks, self._statistics)
        self._treat(optimizers)
        loss = 0.0
        if self.schedule.kind == "adaptive":
            loss = float(self._wire.mean([np.array([one], np.float32) for one in losses])[0])
        self.schedule.begin_period(rate, loss)

    def after_local_step(self, ranks: Sequence[Values]) -> None:
        """Add what an averaging has changed, once its overlap has passed."""
        if self._corrections and self.schedule.local_steps >= self.overlap_steps:
            for values, correction in zip(ranks, self._corrections, strict=True):
                values.update({name: (values[name] + change).astype(np.float32) for name, change in correction.items()})
            self._corrections = []

    def _send(self, ranks: Sequence[Values], rate: float) -> None:
        shapes = [ranks[0][name].shape for name in self._trained]
        self._agree([_flat(values, self._trained) for values in ranks], rate)
        means: Values = dict(zip(self._trained, cut(self._anchor.copy(), shapes), strict=True))
        tables = [{name: values[name] for name in self._statistics} for values in ranks]
        self._mean(tables, self._statistics)
        means |= tables[0]
        self._corrections = [{name: mean - values[name] for name, mean in means.items()} for values in ranks]
        self.schedule.begin_period()

    def _agree(self, held: Sequence[Array], rate: float) -> None:
        """Move the anchor, [elements] float32, to what all ranks go on from."""
        if self._profile.outer_optimizer == "none" and self._profile.local_sgd_dtype == "float32":
            self._anchor = self._wire.mean(held)
            return
        difference = self._wire.mean([self._anchor - values for values in held], self._profile.local_sgd_dtype)
        self._anchor = (self._anchor - self._outer(difference.astype(np.float64), rate)).astype(np.float32)

    def _outer(self, difference: Array, rate: float) -> Array:
        """The step from the anchor. SlowMo: Wang et al. 2019, algorithm 1. DiLoCo: Douillard et al. 2023, Nesterov."""
        lr, momentum = self._profile.outer_lr, self._profile.outer_momentum
        if self._profile.outer_optimizer == "slowmo":
            self._velocity = momentum * self._velocity + difference / rate
            return np.asarray(lr * rate * self._velocity)
        if self._profile.outer_optimizer == "diloco":
            self._velocity = momentum * self._velocity + difference
            return np.asarray(lr * (difference + momentum * self._velocity))
        return difference

    def _mean(self, tables: Sequence[Values], names: Sequence[str]) -> None:
        if not names:
            return
        shapes = [tables[0][name].shape for name in names]
        mean = self._wire.mean([_flat(table, names) for table in tables])
        for table in tables:
            table.update(zip(names, cut(mean.copy(), shapes), strict=True))

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


def _flat(values: Mapping[str, Array], names: Sequence[str]) -> Array:
    return np.concatenate([np.ravel(values[name]).astype(np.float32) for name in names])
