"""LocalSGD: the ranks' values at the end of a period."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fleet_train.plan.compression_settings import Array
from fleet_train.plan.local_sgd import LocalSgdSchedule
from fleet_train.plan.plan import CommPlan, by_mean_dtype
from fleet_train.plan.simulate.methods import cut
from fleet_train.plan.simulate.optimizers import NumpyOptimizer
from fleet_train.plan.simulate.quantised import QuantisedSum
from fleet_train.plan.simulate.wire import SimulatedWire
from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of

Values = dict[str, Array]


class SimulatedAveraging:
    """Values by name, one mapping per rank, changed in place."""

    def __init__(self, profile: Profile, plan: CommPlan, wire: SimulatedWire, start: Mapping[str, Array]) -> None:
        assert plan.averaging is not None
        self.schedule = LocalSgdSchedule.of(profile)
        self._profile, self._wire = profile, wire
        self._statistics = [value.name for value in plan.averaging.statistics]
        self._fragments = [
            _Fragment(profile, plan, wire, part, [plan.averaging.values[i].name for i in positions])
            for part, positions in enumerate(plan.averaging.parts)
        ]
        self.overlap_steps = profile.local_sgd_overlap_steps
        self._corrections: list[Values] = []
        self._steps_beside = 0
        self.after_synchronous_step(start)

    def after_synchronous_step(self, values: Mapping[str, Array]) -> None:
        """Called when all ranks hold ``values``: a period that starts now is measured from them."""
        for fragment in self._fragments:
            fragment.anchor = _flats(values, fragment.names)

    def average(
        self,
        part: int,
        ranks: Sequence[Values],
        optimizers: Sequence[NumpyOptimizer],
        rate: float,
        losses: Sequence[float],
    ) -> None:
        """Make a fragment's parameters equal, with the last one also the statistics and the optimizers' state.

        With an overlap, only compute what each rank will add.
        """
        fragment = self._fragments[part]
        statistics = self._statistics if part == len(self._fragments) - 1 else []
        if self.overlap_steps:
            self._send(fragment, statistics, ranks, rate)
            return
        fragment.agree([_flats(values, fragment.names) for values in ranks], rate)
        for values in ranks:
            values.update(_cut(fragment.anchor, values, fragment.names))
        average(self._wire, ranks, statistics)
        self._treat(optimizers)
        self.schedule.begin_period()
        if self.schedule.kind == "adaptive":
            self.schedule.adapt(rate, float(self._wire.mean([np.array([one], np.float32) for one in losses])[0]))

    def after_local_step(self, ranks: Sequence[Values]) -> None:
        """Add the change of an averaging after its overlap."""
        self._steps_beside += 1
        if self._steps_beside >= self.overlap_steps:
            self._take_in(ranks)

    def synchronise(self, ranks: Sequence[Values]) -> None:
        """Apply an averaging under way, and replace parameters and statistics by their means; the period goes on."""
        self._take_in(ranks)
        average(self._wire, ranks, [name for fragment in self._fragments for name in fragment.names])
        average(self._wire, ranks, self._statistics)

    def _take_in(self, ranks: Sequence[Values]) -> None:
        for values, correction in zip(ranks, self._corrections or [{}] * len(ranks), strict=True):
            changed = {name: values[name] + change for name, change in correction.items()}
            values.update({name: new.astype(values[name].dtype) for name, new in changed.items()})
        self._corrections = []

    def _send(self, fragment: _Fragment, statistics: list[str], ranks: Sequence[Values], rate: float) -> None:
        fragment.agree([_flats(values, fragment.names) for values in ranks], rate)
        means = _cut(fragment.anchor, ranks[0], fragment.names)
        tables = [{name: values[name] for name in statistics} for values in ranks]
        average(self._wire, tables, statistics)
        means |= tables[0]
        self._corrections = [{name: mean - values[name] for name, mean in means.items()} for values in ranks]
        self._steps_beside = 0
        self.schedule.begin_period()

    def _treat(self, optimizers: Sequence[NumpyOptimizer]) -> None:
        kinds = sorted(optimizers[0].state)
        if self._profile.local_sgd_momentum == "average":
            joined = [
                {f"{kind} {name}": value for kind in kinds for name, value in one.state[kind].items()}
                for one in optimizers
            ]
            average(self._wire, joined, sorted(joined[0]))
            for optimizer, table in zip(optimizers, joined, strict=True):
                for kind in kinds:
                    optimizer.state[kind] = {name: table[f"{kind} {name}"] for name in optimizer.state[kind]}
        elif self._profile.local_sgd_momentum == "reset":
            for optimizer in optimizers:
                for kind in kinds:
                    optimizer.state[kind] = {n: np.zeros_like(value) for n, value in optimizer.state[kind].items()}


def average(wire: SimulatedWire, tables: Sequence[Values], names: Sequence[str]) -> None:
    """Replace the values of these names by their means over the ranks; ``tables``: one per rank, changed in place."""
    parts = zip(*[_flats(table, names) for table in tables], strict=True)
    means = [wire.mean(list(part), part[0].dtype.name) for part in parts]
    for table in tables:
        table.update(_cut(means, table, names))


class _Fragment:
    """Parameters that are averaged together: ``anchor``, the last agreed values, one [elements] per dtype."""

    def __init__(self, profile: Profile, plan: CommPlan, wire: SimulatedWire, part: int, names: Sequence[str]) -> None:
        self.names = list(names)
        self.anchor: list[Array] = []
        self._profile, self._plan, self._wire, self._part = profile, plan, wire, part
        self._velocity: dict[int, Array] = {}
        self._sums: dict[int, QuantisedSum] = {}

    def agree(self, held: Sequence[list[Array]], rate: float) -> None:
        """Move the anchor to the new agreed values; ``held``: the ranks' buffers."""
        for index, anchor in enumerate(self.anchor):
            values, own = [buffers[index] for buffers in held], anchor.dtype.name
            if self._profile.outer_optimizer == "none" and self._profile.local_sgd_dtype == "float32":
                self.anchor[index] = self._wire.mean(values, own)
                continue
            difference = self._mean_of(index, [anchor - one for one in values], own)
            self.anchor[index] = (anchor - self._outer(index, difference.astype(np.float64), rate)).astype(own)

    def _mean_of(self, index: int, differences: list[Array], own: str) -> Array:
        wire = self._profile.local_sgd_dtype
        averaging = self._plan.averaging
        if averaging is None or averaging.quantised is None:
            return self._wire.mean(differences, own if wire == "float32" else wire)
        if index not in self._sums:
            name, plan = f"averaged {self._part}.{index}", self._plan
            self._sums[index] = QuantisedSum(
                name, differences[0].size, plan.world_size, plan.team_size, averaging.quantised
            )
        self._wire.count(averaging.collectives_of(self._part)[index])
        total = self._sums[index].sum([one.astype(np.float32) for one in differences])
        return np.asarray(total * np.float32(1.0 / len(differences)))

    def _outer(self, index: int, difference: Array, rate: float) -> Array:
        """The step from the anchor. SlowMo: Wang et al. 2019, algorithm 1. DiLoCo: Douillard et al. 2023, Nesterov."""
        lr, momentum = self._profile.outer_lr, self._profile.outer_momentum
        before = self._velocity.get(index, np.zeros(difference.shape))

        def slowmo() -> Array:
            self._velocity[index] = momentum * before + difference / rate
            return np.asarray(lr * rate * self._velocity[index])

        def diloco() -> Array:
            self._velocity[index] = momentum * before + difference
            return np.asarray(lr * (difference + momentum * self._velocity[index]))

        steps: dict[str, Callable[[], Array]] = {"none": lambda: difference, "slowmo": slowmo, "diloco": diloco}
        return entry_of("outer_optimizer", self._profile.outer_optimizer, steps, "step in the simulation")()


def _flats(values: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
    """One flat array for each dtype in which means are computed."""
    return [
        np.concatenate([np.ravel(values[name]).astype(dtype) for name in own])
        for dtype, own in _by_dtype(values, names).items()
    ]


def _cut(buffers: Sequence[Array], values: Mapping[str, Array], names: Sequence[str]) -> Values:
    """The values of ``_flats`` for these names, by name."""
    found: Values = {}
    for buffer, own in zip(buffers, _by_dtype(values, names).values(), strict=True):
        found |= zip(own, cut(buffer.copy(), [values[name].shape for name in own]), strict=True)
    return found


def _by_dtype(values: Mapping[str, Array], names: Sequence[str]) -> dict[str, list[str]]:
    groups = by_mean_dtype([values[name].dtype.name for name in names])
    return {dtype: [names[i] for i in positions] for dtype, positions in groups.items()}
