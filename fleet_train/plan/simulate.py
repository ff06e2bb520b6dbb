"""All ranks of a job in one process: the caller provides gradients, this module the communication.

The optimizers are those of ``paddle.optimizer``, written from their definitions: values and state keep the value's
dtype, and a weight decay is Paddle's ``weight_decay=float``, L2, added to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fleet_train.errors import ConversionError
from fleet_train.plan.build import LocalSgdSchedule
from fleet_train.plan.plan import CommPlan, by_mean_dtype
from fleet_train.plan.simulate_methods import Array, QuantisedSum, RowsSimulation, SimulatedParts, SimulatedWire, cut
from fleet_train.plan.simulate_shards import ShardedSimulation
from fleet_train.profile import Profile
from fleet_train.profile.methods import description_of
from fleet_train.profile.methods.outer import outer_optimizer_of
from fleet_train.profile.methods.rows import ROWS

Values = dict[str, Array]


class SimulatedAveraging:
    """The averagings of LocalSGD in numpy. Values are given by name, one mapping per rank, and changed in place."""

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
        self._overlapped_steps = 0
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
        self._average_or_reset_state(optimizers)
        self.schedule.begin_period()
        if self.schedule.kind == "adaptive":
            self.schedule.adapt(rate, float(self._wire.mean([np.array([loss], np.float32) for loss in losses])[0]))

    def after_local_step(self, ranks: Sequence[Values]) -> None:
        """Add the change of an averaging after its overlap."""
        self._overlapped_steps += 1
        if self._overlapped_steps >= self.overlap_steps:
            self._apply_corrections(ranks)

    def synchronise(self, ranks: Sequence[Values]) -> None:
        """Apply an averaging under way, and replace parameters and statistics by their means; the period goes on."""
        self._apply_corrections(ranks)
        average(self._wire, ranks, [name for fragment in self._fragments for name in fragment.names])
        average(self._wire, ranks, self._statistics)

    def _apply_corrections(self, ranks: Sequence[Values]) -> None:
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
        self._overlapped_steps = 0
        self.schedule.begin_period()

    def _average_or_reset_state(self, optimizers: Sequence[NumpyOptimizer]) -> None:
        kinds = sorted(optimizers[0].state)
        if self._profile.local_sgd_momentum == "average":
            joined = [
                {f"{kind} {name}": value for kind in kinds for name, value in optimizer.state[kind].items()}
                for optimizer in optimizers
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
        self._velocity: dict[int, Array | None] = {}
        self._sums: dict[int, QuantisedSum] = {}

    def agree(self, held: Sequence[list[Array]], rate: float) -> None:
        """Move the anchor to the new agreed values; ``held``: the ranks' buffers."""
        for index, anchor in enumerate(self.anchor):
            values, own = [buffers[index] for buffers in held], anchor.dtype.name
            if self._profile.outer_optimizer == "none" and self._profile.local_sgd_dtype == "float32":
                self.anchor[index] = self._wire.mean(values, own)
                continue
            difference = self._mean_of(index, [anchor - value for value in values], own)
            change, self._velocity[index] = outer_optimizer_of(self._profile.outer_optimizer).step(
                difference.astype(np.float64),
                self._velocity.get(index),
                rate,
                self._profile.outer_lr,
                self._profile.outer_momentum,
            )
            self.anchor[index] = (anchor - change).astype(own)

    def _mean_of(self, index: int, differences: list[Array], own: str) -> Array:
        wire = self._profile.local_sgd_dtype
        averaging = self._plan.averaging
        if averaging is None or averaging.quantised is None:
            return self._wire.mean(differences, own if wire == "float32" else wire)
        if index not in self._sums:
            name, plan = f"averaged {self._part}.{index}", self._plan
            self._sums[index] = QuantisedSum(
                name, differences[0].size, plan.world_size, plan.group_size, averaging.quantised
            )
        self._wire.count(averaging.collectives_of(self._part)[index])
        total = self._sums[index].sum([difference.astype(np.float32) for difference in differences])
        return np.asarray(total * np.float32(1.0 / len(differences)))


def _flats(values: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
    """One flat array for each dtype in which means are computed."""
    return [
        np.concatenate([np.ravel(values[name]).astype(dtype) for name in own])
        for dtype, own in _by_dtype(values, names).items()
    ]


def _cut(buffers: Sequence[Array], values: Mapping[str, Array], names: Sequence[str]) -> Values:
    """The values of ``_flats`` for these names, by name."""
    by_name: Values = {}
    for buffer, own in zip(buffers, _by_dtype(values, names).values(), strict=True):
        by_name |= zip(own, cut(buffer.copy(), [values[name].shape for name in own]), strict=True)
    return by_name


def _by_dtype(values: Mapping[str, Array], names: Sequence[str]) -> dict[str, list[str]]:
    groups = by_mean_dtype([values[name].dtype.name for name in names])
    return {dtype: [names[i] for i in positions] for dtype, positions in groups.items()}


class NumpyOptimizer(Protocol):
    """One rank's optimizer. ``state``: the state that LocalSGD may average or reset, by kind, then by parameter."""

    state: dict[str, dict[str, Array]]

    def step(self, name: str, value: Array, gradient: Array, rate: float) -> Array:
        """The parameter's next value, of its shape and dtype."""
        ...


@dataclass
class Sgd:
    """value - rate * gradient."""

    weight_decay: float = 0.0
    state: dict[str, dict[str, Array]] = field(default_factory=dict)

    def step(self, name: str, value: Array, gradient: Array, rate: float) -> Array:
        del name
        return (value.astype(np.float64) - rate * (gradient + self.weight_decay * value)).astype(value.dtype)


@dataclass
class Momentum:
    """velocity = momentum * velocity + gradient; value - rate * velocity, or Nesterov's look ahead."""

    momentum: float = 0.9
    use_nesterov: bool = False
    weight_decay: float = 0.0
    state: dict[str, dict[str, Array]] = field(default_factory=lambda: {"velocity": {}})

    def step(self, name: str, value: Array, gradient: Array, rate: float) -> Array:
        pushed = gradient.astype(np.float64) + self.weight_decay * value
        velocity = self.momentum * self.state["velocity"].get(name, np.zeros(value.shape)) + pushed
        self.state["velocity"][name] = velocity.astype(value.dtype)
        ahead = pushed + self.momentum * velocity if self.use_nesterov else velocity
        return np.asarray(value - rate * ahead, dtype=value.dtype)


@dataclass
class Adam:
    """Kingma and Ba 2015, with the bias corrected in the rate and ``epsilon`` scaled with it, as Paddle does.

    ``decoupled_decay``: AdamW's, which scales the value down before the step (Loshchilov and Hutter 2019).
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled_decay: float = 0.0
    state: dict[str, dict[str, Array]] = field(default_factory=lambda: {"moment1": {}, "moment2": {}})
    steps: dict[str, int] = field(default_factory=dict)

    def step(self, name: str, value: Array, gradient: Array, rate: float) -> Array:
        self.steps[name] = number = self.steps.get(name, 0) + 1
        wide, zeros = gradient.astype(np.float64), np.zeros(value.shape)
        first = self.beta1 * self.state["moment1"].get(name, zeros) + (1 - self.beta1) * wide
        second = self.beta2 * self.state["moment2"].get(name, zeros) + (1 - self.beta2) * wide**2
        self.state["moment1"][name], self.state["moment2"][name] = first.astype(value.dtype), second.astype(value.dtype)
        correction = np.sqrt(1 - self.beta2**number)
        scaled = rate * correction / (1 - self.beta1**number)
        change = scaled * first / (np.sqrt(second) + self.epsilon * correction)
        shrunk = value * (1 - rate * self.decoupled_decay)
        return np.asarray(shrunk - change, dtype=value.dtype)


@dataclass(frozen=True)
class Local:
    """The result of one rank's forward and backward pass.

    ``gradients``: by parameter's name, of its shape; ``loss`` is read by an adaptive LocalSGD; ``statistics``: the new
    running means and variances of this rank.
    """

    gradients: Mapping[str, Array]
    loss: float = 0.0
    statistics: Mapping[str, Array] = field(default_factory=dict)


Backward = Callable[[int, Mapping[str, Array]], Local]
"""``backward(rank, values)``: one rank's pass on its own batch with its own values (parameters and statistics)."""


@dataclass(frozen=True)
class Step:
    """The result of `SimulatedJob.step`."""

    updated: bool
    """False for a micro-batch of a gradient merge without an update."""
    synchronised: bool
    """Whether it made the parameters of all ranks equal: gradients or parameters were averaged."""
    averaged: bool
    """Whether LocalSGD averaged the parameters."""
    sent: tuple[float, ...]
    """Payload bytes that each rank sent, to any rank."""
    gradients: Mapping[str, Array]
    """The averaged gradients; empty in a local step and between updates."""


class SimulatedJob:
    """A plan and its profile carried out step by step.

    ``start``: every value of a rank by name (parameters, statistics), float32; all ranks start from it.
    ``optimizer``: makes one rank's optimizer. ``ranks``: the current values of each rank. ``rate``: the learning rate
    of the next step. Not simulated, because they are part of a rank's own pass and its gradients: mixed precision,
    recompute, synchronised batch norm.
    """

    def __init__(
        self,
        plan: CommPlan,
        profile: Profile,
        start: Mapping[str, Array],
        optimizer: Callable[[], NumpyOptimizer] = Sgd,
        rate: float = 0.1,
    ) -> None:
        names = [gradient.name for bucket in plan.buckets for gradient in bucket.gradients]
        if missing := [name for name in names if name not in start]:
            raise ConversionError(f"simulate: no start value for {missing[0]!r}, whose gradient the plan sends")
        self.rate = rate
        self.updates = 0
        self._with_gradient = frozenset(names)
        self.ranks: list[Values] = [{name: np.array(v) for name, v in start.items()} for _ in range(plan.world_size)]
        self._plan = plan
        self._wire = SimulatedWire(plan)
        self.optimizers = [optimizer() for _ in range(plan.world_size)]
        self._profile = profile
        self._exchanges = 0
        simulated = [SimulatedParts(bucket, plan, profile, self._wire) for bucket in plan.buckets]
        self._references = [
            ShardedSimulation(parts)
            if plan.owners and parts.bucket.algorithm != ROWS
            else description_of(parts.bucket).in_numpy(parts)
            for parts in simulated
        ]
        self._averaging: SimulatedAveraging | None = None
        if plan.averaging is not None:
            self._averaging = SimulatedAveraging(profile, plan, self._wire, start)
        self._merged: list[list[Local]] = []

    def step(self, backward: Backward) -> Step:
        """One run of every rank's program: a micro-batch, and an update when the merge is complete."""
        local = [backward(rank, values) for rank, values in enumerate(self.ranks)]
        for values, result in zip(self.ranks, local, strict=True):
            values.update({name: np.array(value) for name, value in result.statistics.items()})
        self._merged.append(local)
        if len(self._merged) < self._plan.accumulate_steps:
            return Step(False, False, False, self._wire.read_sent(), {})
        gradients = [_merge([local[rank] for local in self._merged]) for rank in range(self._plan.world_size)]
        self._merged = []
        return self._update(gradients, [result.loss for result in local])

    def synchronise(self) -> None:
        """What `fleet.synchronize_parameters` does between two steps: all ranks hold the same values after it.

        Statistics become their means over the ranks; after a local step an averaging under way is applied, and the
        parameters become their means, too. Its bytes are not counted.
        """
        if self._averaging is None or self._averaging.schedule.is_synchronous(self.updates):
            average(self._wire, self.ranks, [name for name in self.ranks[0] if name not in self._with_gradient])
        else:
            self._averaging.synchronise(self.ranks)
        self._wire.read_sent()

    def _update(self, gradients: Sequence[Values], losses: Sequence[float]) -> Step:
        self.updates += 1
        averaging = self._averaging
        if averaging is None or averaging.schedule.is_synchronous(self.updates):
            agreed = self._exchange(gradients)
            self._apply([agreed] * len(self.ranks))
            if averaging is not None:
                averaging.after_synchronous_step(self.ranks[0])
            return Step(True, True, False, self._wire.read_sent(), agreed)
        self._apply(gradients)
        due = averaging.schedule.count()
        if due is not None:
            averaging.average(due, self.ranks, self.optimizers, self.rate, losses)
        else:
            averaging.after_local_step(self.ranks)
        makes_equal = due is not None and not averaging.overlap_steps and averaging.schedule.fragments == 1
        return Step(True, makes_equal, due is not None, self._wire.read_sent(), {})

    def _exchange(self, gradients: Sequence[Values]) -> Values:
        agreed: Values = {}
        for bucket, reference in zip(self._plan.buckets, self._references, strict=True):
            names = [gradient.name for gradient in bucket.gradients]
            local = [[rank[name] for name in names] for rank in gradients]
            sent = (*bucket.sent, *bucket.updated)
            if isinstance(reference, RowsSimulation):
                sent = (*reference.sent(local), *bucket.updated)
            elif not bucket.shards:
                sent = description_of(bucket).sent(bucket, self._profile, bool(self._plan.group_size), self._exchanges)
            for payload in sent:
                self._wire.count(payload)
            results = reference.step(local)
            if bucket.dtype == "float32":
                results = [values.astype(np.float32) for values in results]
            agreed |= zip(names, results, strict=True)
        self._exchanges += 1
        return agreed

    def _apply(self, gradients: Sequence[Values]) -> None:
        for values, optimizer, own in zip(self.ranks, self.optimizers, gradients, strict=True):
            for name, gradient in own.items():
                values[name] = optimizer.step(name, values[name], gradient, self.rate)


def _merge(micro_batches: Sequence[Local]) -> Values:
    """The mean of one rank's micro-batches."""
    return {
        name: np.asarray(
            np.mean([batch.gradients[name] for batch in micro_batches], axis=0, dtype=np.float64).astype(first.dtype)
        )
        for name, first in micro_batches[0].gradients.items()
    }
