"""The passes of one conversion, in the only valid order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import paddle

from fleet_train.collectives.host_ops import emit_hold
from fleet_train.collectives.job import Job
from fleet_train.collectives.sync_batch_norm import RankStatistics
from fleet_train.convert.passes.gradient_merge import (
    GradientMerge,
    LossScaler,
    LossScaling,
    MergedGradients,
    merge_gradients,
)
from fleet_train.convert.passes.norm_arithmetic import Composed, Kernels
from fleet_train.convert.passes.precision import MixedPrecision, lower_precision, said_of
from fleet_train.convert.passes.recompute import Recompute, recompute_segments
from fleet_train.convert.passes.sync_norm import synchronize_batch_norms
from fleet_train.errors import ConversionError
from fleet_train.profile.methods.base import CollectiveSpec

Pairs = list[tuple[Any, Any]]


@dataclass(frozen=True)
class PassSettings:
    """The passes that the profile asks for; by default none. ``loss_scaling`` is used with float16 only."""

    precision: MixedPrecision = field(default_factory=MixedPrecision)
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    merge: GradientMerge = field(default_factory=GradientMerge)
    recompute: Recompute = field(default_factory=Recompute)
    sync_batch_norm: bool = False


class ProgramPasses:
    """Three calls around the optimizer's work: ``backward``, ``merge``, ``update``, in the current program."""

    def __init__(self, settings: PassSettings, job: Job) -> None:
        self._settings = settings
        self._job = job
        self._on_gpu = not isinstance(job.place, paddle.CPUPlace)
        self._synchronizes = settings.sync_batch_norm and job.world_size > 1
        self._scaler: LossScaler | None = None
        self._statistics: RankStatistics | None = None
        self.exchanges: list[CollectiveSpec] = []
        """The exchanges of synchronised batch norm in one pass; known after ``backward``."""

    @property
    def change_nothing(self) -> bool:
        """Whether the program is the one that the optimizer alone would make."""
        return replace(self._settings, sync_batch_norm=self._synchronizes) == PassSettings()

    @property
    def notices(self) -> list[str]:
        """Rank 0's notes on how the settings are carried out on this device."""
        return said_of(self._settings.precision, self._on_gpu, self._settings.recompute.is_on)

    @property
    def update_each_alone(self) -> bool:
        """Whether ``update`` may be called several times in a step, for some of the parameters each."""
        return self._settings.merge.accumulate_steps == 1 and self._scaler is None and self._statistics is None

    def backward(self, loss: Any, derive: Callable[[Any], Sequence[tuple[Any, Any]]]) -> Pairs:
        """Lower the forward program, append its gradients with ``derive(loss)``, rewrite both; returns the pairs."""
        settings = self._settings
        lower_precision(loss, settings.precision, on_gpu=self._on_gpu, recomputes=settings.recompute.is_on)
        pairs = list(derive(self._scaled(loss)))
        if self._synchronizes:
            self._statistics = RankStatistics(self._job)
            arithmetic = Composed() if self._on_gpu else Kernels()
            pairs = synchronize_batch_norms(pairs, self._statistics, arithmetic)
            self.exchanges = self._statistics.exchanges
        recompute_segments(loss, settings.recompute, emit_hold)
        return pairs

    @property
    def loss_scale(self) -> Any:
        """The loss scale, float32 [1]; None until it exists."""
        return None if self._scaler is None else self._scaler.scale

    @property
    def loss_scale_name(self) -> str | None:
        """The variable with the loss scale; None until it exists."""
        return None if self._scaler is None else str(self._scaler.scale.name)

    def merge(self, pairs: Sequence[tuple[Any, Any]]) -> MergedGradients:
        """Call it before the plan is made: launch operators then follow the sums, not the gradients."""
        return merge_gradients(pairs, self._settings.merge)

    def update(self, merged: MergedGradients, averaged: Pairs, update: Callable[[Pairs], Any]) -> Any:
        """Append ``update(pairs)``, the optimizer's operators, for the steps with an update; returns its result.

        ``averaged``: ``merged.pairs`` after the exchange. All ranks call it after they have agreed on the plan.
        """
        if self._statistics is not None:
            self._statistics.connect()
        if self._scaler is None:
            return merged.apply(lambda: update(averaged))
        scaler = self._scaler
        return merged.apply(lambda: scaler.apply(averaged, update))

    def _scaled(self, loss: Any) -> Any:
        if self._settings.precision.level == "O0" or self._settings.precision.dtype != "float16":
            return loss
        if self._scaler is not None:
            raise ConversionError(
                "amp dtype float16: backward was called twice on one optimizer; make one optimizer per loss, each has "
                "its own loss scale"
            )
        self._scaler = LossScaler(self._settings.loss_scaling)
        return self._scaler.scaled(loss)
