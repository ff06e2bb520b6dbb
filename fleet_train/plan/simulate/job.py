"""All ranks of a job in one process: the caller provides gradients, this module the communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet_train.errors import ConversionError
from fleet_train.plan.compression_settings import Array
from fleet_train.plan.plan import CommPlan
from fleet_train.plan.simulate.averaging import SimulatedAveraging, Values, average
from fleet_train.plan.simulate.methods import make_method
from fleet_train.plan.simulate.optimizers import Momentum, NumpyOptimizer, Sgd
from fleet_train.plan.simulate.wire import SimulatedWire
from fleet_train.profile import Profile


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
    ``optimizer``: makes one rank's optimizer; with DGC, Momentum's momentum moves to DGC, as in training. ``ranks``:
    the current values of each rank. ``rate``: the learning rate of the next step. Not simulated, because they are part
    of a rank's own pass and its gradients: mixed precision, recompute, synchronised batch norm.
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
        made = [optimizer() for _ in range(plan.world_size)]
        self.optimizers, momentum, nesterov = _give_momentum_away(made, profile)
        self._methods = [make_method(b, plan, profile, self._wire, momentum, nesterov) for b in plan.buckets]
        self._averaging: SimulatedAveraging | None = None
        if plan.averaging is not None:
            self._averaging = SimulatedAveraging(profile, plan, self._wire, start)
        self._merged: list[list[Local]] = []

    def step(self, backward: Backward) -> Step:
        """One run of every rank's program: a micro-batch, and an update when the merge is complete."""
        local = [backward(rank, values) for rank, values in enumerate(self.ranks)]
        for values, one in zip(self.ranks, local, strict=True):
            values.update({name: np.array(value) for name, value in one.statistics.items()})
        self._merged.append(local)
        if len(self._merged) < self._plan.accumulate_steps:
            return Step(False, False, False, self._wire.take(), {})
        gradients = [_merge([local[rank] for local in self._merged]) for rank in range(self._plan.world_size)]
        self._merged = []
        return self._update(gradients, [one.loss for one in local])

    def synchronise(self) -> None:
        """What `fleet.synchronize_parameters` does between two steps: all ranks hold the same values after it.

        Statistics become their means over the ranks; after a local step an averaging under way is applied, and the
        parameters become their means, too. Its bytes are not counted.
        """
        if self._averaging is None or self._averaging.schedule.is_synchronous(self.updates):
            average(self._wire, self.ranks, [name for name in self.ranks[0] if name not in self._with_gradient])
        else:
            self._averaging.synchronise(self.ranks)
        self._wire.take()

    def _update(self, gradients: Sequence[Values], losses: Sequence[float]) -> Step:
        self.updates += 1
        averaging = self._averaging
        if averaging is None or averaging.schedule.is_synchronous(self.updates):
            agreed = self._exchange(gradients)
            self._apply([agreed] * len(self.ranks))
            if averaging is not None:
                averaging.after_synchronous_step(self.ranks[0])
            return Step(True, True, False, self._wire.take(), agreed)
        self._apply(gradients)
        due = averaging.schedule.count()
        if due is not None:
            averaging.average(due, self.ranks, self.optimizers, self.rate, losses)
        else:
            averaging.after_local_step(self.ranks)
        makes_equal = due is not None and not averaging.overlap_steps and averaging.schedule.fragments == 1
        return Step(True, makes_equal, due is not None, self._wire.take(), {})

    def _exchange(self, gradients: Sequence[Values]) -> Values:
        agreed: Values = {}
        for bucket, method in zip(self._plan.buckets, self._methods, strict=True):
            names = [gradient.name for gradient in bucket.gradients]
            agreed |= zip(names, method.average([[rank[name] for name in names] for rank in gradients]), strict=True)
        return agreed

    def _apply(self, gradients: Sequence[Values]) -> None:
        for values, optimizer, own in zip(self.ranks, self.optimizers, gradients, strict=True):
            for name, gradient in own.items():
                values[name] = optimizer.step(name, values[name], gradient, self.rate)


def _merge(micro_batches: Sequence[Local]) -> Values:
    """The mean of one rank's micro-batches."""
    return {
        name: np.asarray(
            np.mean([one.gradients[name] for one in micro_batches], axis=0, dtype=np.float64).astype(first.dtype)
        )
        for name, first in micro_batches[0].gradients.items()
    }


def _give_momentum_away(made: list[NumpyOptimizer], profile: Profile) -> tuple[list[NumpyOptimizer], float, bool]:
    """The optimizers after the exchange, and DGC's settings before it: momentum, and whether it is Nesterov's."""
    first = made[0]
    if profile.compression != "dgc" or isinstance(first, Sgd):
        return made, 0.0, False
    if not isinstance(first, Momentum):
        raise ConversionError(f"simulate: dgc works with Sgd and Momentum, not with {type(first).__name__}")
    behind: list[NumpyOptimizer] = [Sgd(first.weight_decay) for _ in made]
    return behind, first.momentum, first.use_nesterov
