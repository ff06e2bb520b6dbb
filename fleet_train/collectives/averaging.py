"""LocalSGD while a program runs: local steps, and the averaging of parameters at the end of a period."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.collectives.flats import flats, write
from fleet_train.collectives.outer import OuterOptimizer
from fleet_train.collectives.reducers import Reducer, without_cast
from fleet_train.plan.local_sgd import LocalSgdSchedule
from fleet_train.profile import Profile


@dataclass
class Held:
    """The tensors of one rank that LocalSGD treats, as eager tensors that share memory with the scope's variables."""

    parameters: list[Any]
    statistics: list[Any]
    """Batch-norm statistics: averaged as they are, whatever is done with the parameters."""
    accumulators: list[Any]
    """The optimizer's own state of floating dtype; empty unless the profile wants it averaged or reset."""


class ParameterAverager:
    """Averages parameters over all ranks when the schedule says so. Runs on one communicator's thread."""

    def __init__(self, profile: Profile, reducer: Reducer, world_size: int, rate: Callable[[], float]) -> None:
        self.schedule = LocalSgdSchedule.of(profile)
        self.outer = OuterOptimizer(profile)
        self.overlap_steps = profile.local_sgd_overlap_steps
        self.anchor: list[Any] | None = None
        """What all ranks held after the last averaging, as `flats` of the parameters."""
        self._profile = profile
        self._reducer = without_cast(reducer)
        self._world_size = world_size
        self._rate = rate
        # The kept copy of the last agreed values is needed only where differences are sent or given momentum.
        self.keeps_anchor = profile.outer_optimizer != "none" or profile.local_sgd_dtype != "float32"

    def before_update(self, parameters: Sequence[Any]) -> None:
        """Remember the very start: all ranks hold the same values there."""
        if self.keeps_anchor and self.anchor is None:
            self.anchor = flats(parameters)

    def after_synchronous_step(self, step: int, held: Held) -> None:
        """The last warm-up step ends with equal parameters: local training starts from them."""
        if self.keeps_anchor and step == self.schedule.warm_steps:
            self.anchor = flats(held.parameters)

    def average(self, held: Held, loss: Any) -> None:
        """Make the parameters of all ranks equal and start the next period."""
        write(held.parameters, self.agree(flats(held.parameters), self._rate()))
        self.mean(held.statistics)
        self._treat_accumulators(held.accumulators)
        mean_loss = 0.0
        if self.schedule.kind == "adaptive":
            mean_loss = self._reducer.sum(loss.cast("float32").reshape([-1]).clone()).mean().item() / self._world_size
        self.schedule.begin_period(self._rate(), mean_loss)

    def mean(self, tensors: Sequence[Any]) -> None:
        """Replace tensors by their mean over all ranks, in place."""
        write(tensors, [self.mean_of(buffer) for buffer in flats(tensors)])

    def mean_of(self, buffer: Any) -> Any:
        """The mean over all ranks of a flat tensor, which is overwritten."""
        return self._reducer.sum(buffer).scale_(1.0 / self._world_size)

    def agree(self, values: list[Any], rate: float) -> list[Any]:
        """What the ranks go on from after an averaging of their ``flats``.

        Overwrites ``values`` unless ``keeps_anchor``.
        """
        if not self.keeps_anchor:
            return [self.mean_of(buffer) for buffer in values]
        assert self.anchor is not None
        differences = [anchor - buffer for anchor, buffer in zip(self.anchor, values, strict=True)]
        self.anchor = self.outer.step(self.anchor, [self._mean_difference(one) for one in differences], rate)
        return self.anchor

    def _mean_difference(self, difference: Any) -> Any:
        if self._profile.local_sgd_dtype != "bfloat16":
            return self.mean_of(difference)
        # Not scaled in bfloat16: 1/3 has 8 bits there, too, and every mean of three ranks would be 0.2 % too large.
        return self._reducer.sum(difference.cast("bfloat16")).cast(difference.dtype).scale_(1.0 / self._world_size)

    @property
    def rate(self) -> float:
        """The inner optimizer's learning rate now."""
        return self._rate()

    def _treat_accumulators(self, accumulators: Sequence[Any]) -> None:
        if self._profile.local_sgd_momentum == "average":
            self.mean(accumulators)
        elif self._profile.local_sgd_momentum == "reset":
            for tensor in accumulators:
                tensor.zero_()
