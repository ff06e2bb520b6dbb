"""LocalSGD while a program runs: local steps, and the averaging of parameters at the end of a period."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.collectives.engines.device import HostCopy
from fleet_train.collectives.engines.stages import HAND_OVER, Stages
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
    """Averages parameters over all ranks when the schedule says so.

    ``rate``: the inner optimizer's learning rate; ``later``: makes a copy of a device value that the host reads later.
    """

    def __init__(
        self,
        profile: Profile,
        reducer: Reducer,
        world_size: int,
        rate: Callable[[], float],
        later: Callable[[Any], HostCopy],
    ) -> None:
        self.schedule = LocalSgdSchedule.of(profile)
        self.outer = OuterOptimizer(profile)
        self.overlap_steps = profile.local_sgd_overlap_steps
        self.anchor: list[Any] | None = None
        """What all ranks held after the last averaging, as `flats` of the parameters."""
        self._profile = profile
        self._reducer = without_cast(reducer)
        self._world_size = world_size
        self._rate = rate
        self._later = later
        self._heard: tuple[HostCopy, float] | None = None
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

    def average(self, held: Held, loss: Any) -> Stages[None]:
        """Make the parameters of all ranks equal and start the next period."""
        yield HAND_OVER
        sent, rate = flats(held.parameters), self._rate()
        others = flats(held.statistics)
        heard = [loss.cast("float32").reshape([-1]).clone()] if self.schedule.kind == "adaptive" else []
        more = self._profile.local_sgd_momentum == "average" and bool(held.accumulators)
        agreed, means = yield from self.agree(sent, rate, [*others, *heard], more)
        write(held.parameters, agreed)
        write(held.statistics, means[: len(others)])
        if more:
            yield from self._mean(held.accumulators)
        elif self._profile.local_sgd_momentum == "reset":
            for tensor in held.accumulators:
                tensor.zero_()
        self.schedule.begin_period()
        if heard:
            self._heard = self._later(means[-1].mean()), rate

    def settle(self) -> None:
        """Read what the last averaging has brought to the host: before a step counts, and before state is saved."""
        if self._heard is not None:
            (loss, rate), self._heard = self._heard, None
            self.schedule.adapt(rate, loss.read().item())

    def mean(self, tensors: Sequence[Any]) -> Stages[None]:
        """Replace tensors by their mean over all ranks, in place."""
        yield HAND_OVER
        yield from self._mean(tensors)

    def agree(
        self, values: list[Any], rate: float, beside: Sequence[Any] = (), more: bool = False
    ) -> Stages[tuple[list[Any], list[Any]]]:
        """What the ranks go on from after an averaging of their ``flats``, and the means of the buffers ``beside``.

        Overwrites ``beside``, and ``values`` unless ``keeps_anchor``.
        """
        sent = self._differences(values) if self.keeps_anchor else values
        sums = yield from self._reducer.sum([*sent, *beside], more)
        means = [self._mean_of(total, buffer) for total, buffer in zip(sums, [*values, *beside], strict=True)]
        averages, others = means[: len(sent)], means[len(sent) :]
        if not self.keeps_anchor:
            return averages, others
        assert self.anchor is not None
        self.anchor = self.outer.step(self.anchor, averages, rate)
        return self.anchor, others

    def _mean(self, tensors: Sequence[Any]) -> Stages[None]:
        buffers = flats(tensors)
        sums = yield from self._reducer.sum(buffers)
        write(tensors, [self._mean_of(total, buffer) for total, buffer in zip(sums, buffers, strict=True)])

    def _differences(self, values: list[Any]) -> list[Any]:
        """What is sent of ``values``: how far they are from the last agreed ones."""
        assert self.anchor is not None
        differences = [anchor - buffer for anchor, buffer in zip(self.anchor, values, strict=True)]
        if self._profile.local_sgd_dtype != "bfloat16":
            return differences
        return [difference.cast("bfloat16") for difference in differences]

    def _mean_of(self, total: Any, like: Any) -> Any:
        """Not scaled in bfloat16: 1/3 has 8 bits there, too, and every mean of three ranks would be 0.2 % too large."""
        total = total if total.dtype == like.dtype else total.cast(like.dtype)
        return total.scale_(1.0 / self._world_size)

    @property
    def rate(self) -> float:
        """The inner optimizer's learning rate now."""
        return self._rate()
