"""The passes of one conversion, in the only valid order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle

from fleet_train.collectives.job import Job
from fleet_train.collectives.sync_batch_norm import RankStatistics
from fleet_train.convert.passes.gradient_merge import LossScaler, MergedGradients, merge_gradients
from fleet_train.convert.passes.norm_arithmetic import Composed, Kernels
from fleet_train.convert.passes.precision import MixedPrecision, lower_precision, said_of
from fleet_train.convert.passes.recompute import recompute_segments, recomputes
from fleet_train.convert.passes.sync_norm import synchronize_batch_norms
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import CollectiveSpec

Pairs = list[tuple[Any, Any]]


class ProgramPasses:
    """Three calls around the optimizer's work: ``backward``, ``merge``, ``update``, in the current program."""

    def __init__(self, profile: Profile, job: Job) -> None:
        self._profile = profile
        self._precision = MixedPrecision(profile.amp_level, profile.amp_dtype, profile.amp_keep_batch_norm_fp32)
        self._job = job
        self._on_gpu = not isinstance(job.place, paddle.CPUPlace)
        self._synchronizes = profile.sync_batch_norm and job.world_size > 1
        self._scaler: LossScaler | None = None
        self._statistics: RankStatistics | None = None
        self.exchanges: list[CollectiveSpec] = []
        """The exchanges of synchronised batch norm in one pass; known after ``backward``."""

    @property
    def notices(self) -> list[str]:
        """Rank 0's notes on how the settings are carried out on this device."""
        return said_of(self._precision, self._on_gpu, recomputes(self._profile))

    @property
    def update_each_alone(self) -> bool:
        """Whether ``update`` may be called several times in a step, for some of the parameters each."""
        return self._profile.accumulate_steps == 1 and self._scaler is None and self._statistics is None

    def backward(self, loss: Any, derive: Callable[[Any], Sequence[tuple[Any, Any]]]) -> Pairs:
        """Lower the forward program, append its gradients with ``derive(loss)``, rewrite both; returns the pairs."""
        lower_precision(loss, self._precision, on_gpu=self._on_gpu, recomputes=recomputes(self._profile))
        pairs = list(derive(self._scaled(loss)))
        if self._synchronizes:
            self._statistics = RankStatistics(self._job)
            arithmetic = Composed() if self._on_gpu else Kernels()
            pairs = synchronize_batch_norms(pairs, self._statistics, arithmetic)
            self.exchanges = self._statistics.exchanges
        recompute_segments(loss, self._profile)
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
        return merge_gradients(pairs, self._profile.accumulate_steps)

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
        if self._precision.level == "O0" or self._precision.dtype != "float16":
            return loss
        if self._scaler is not None:
            raise ConversionError(
                "amp dtype float16: backward was called twice on one optimizer; make one optimizer per loss, each has "
                "its own loss scale"
            )
        self._scaler = LossScaler(self._profile)
        return self._scaler.scaled(loss)
