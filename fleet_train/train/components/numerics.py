"""NaN and infinity: skips updates, keeps statistics usable, and names the samples of a loss."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import _C_ops

from fleet_train import fleet
from fleet_train.convert.passes.conditional import run_if
from fleet_train.data.core.datasets import Arrays
from fleet_train.errors import NotFinite, ProfileError
from fleet_train.plan.compressions import compression_of
from fleet_train.profile import Profile
from fleet_train.train.components.statistics import statistics_of

Pairs = list[tuple[Any, Any]]
_NAMED_SAMPLES = 64


class SkipNotFinite:
    """Skips an update whose averaged gradients hold NaN or infinity, and counts it.

    One rank's NaN is in the average, which is equal on all ranks, so all skip the same update without a message. In
    LocalSGD's local steps there is no average, and a rank skips only its own update. With gradient merge the update of
    all its micro-batches is skipped.
    """

    def __init__(self) -> None:
        self._skipped = ""

    def guard(self, update: Callable[[Pairs], Any], pairs: Pairs) -> Any:
        """For `DistributedOptimizer.around_update`; add it last, so that nothing else sees such gradients."""
        present = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        one = paddle.full([1], 1.0, "float32")
        values, found = _C_ops.check_finite_and_unscale_([gradient for _, gradient in present], one)
        zero = paddle.nn.initializer.Constant(0.0)
        skipped = paddle.pir.core.create_persistable_value(paddle.int64, [1], "skipped_updates", initializer=zero)
        paddle.assign(skipped + found.reshape([1]).astype("int64"), skipped)
        self._skipped = skipped.name
        checked = [(parameter, value) for (parameter, _), value in zip(present, values, strict=True)]
        return run_if(paddle.logical_not(found), lambda: update(checked))

    def count(self) -> int:
        """Updates that this rank has skipped since the beginning of the run; a checkpoint keeps the number."""
        return int(np.asarray(paddle.static.global_scope().find_var(self._skipped).get_tensor()).item())


def refuse_to_skip_with(profile: Profile) -> None:
    """Raise ProfileError for a profile that keeps state of a gradient beyond the skipped update."""
    if compression_of(profile.compression).keeps_nan:
        raise ProfileError(
            f"--on_nan skip with compression: {profile.compression}: the unsent part of a gradient is kept and sent "
            "later, so that one NaN would stay in it forever; use --on_nan stop, or compression: none or bf16"
        )
    if profile.use_local_sgd and profile.local_sgd_schedule == "adaptive":
        raise ProfileError(
            "--on_nan skip with local_sgd_schedule: adaptive: its next period is computed from the loss, which would "
            "be NaN; use --on_nan stop, or a constant or doubling schedule"
        )


def keep_statistics_finite(program: Any) -> None:
    """Append to a finished program: untrained values (batch norm's running statistics) that would end a run of the
    program with NaN or infinity keep their previous values.

    The forward pass updates them before any gradient is checked.
    """
    block = program.global_block()
    names = statistics_of(program)
    kept = [each for each in block.all_parameters() if each.name in names]
    with paddle.static.program_guard(program, paddle.static.Program()):
        for value in kept:
            paddle.pir.set_insertion_point_after(value.get_defining_op())
            before = paddle.assign(value)
            paddle.pir.reset_insertion_point_to_end()
            paddle.assign(paddle.where(paddle.isfinite(value).all(), value, before), value)


class LossWatch:
    """Checks this rank's fetched losses and reacts to one that is not finite."""

    def __init__(self, skipping: SkipNotFinite | None) -> None:
        self._skipping = skipping
        self._looked_at = 0

    def look(self, loss: float, step: int, indices: NDArray[np.int64], batch: Arrays) -> None:
        """Raises NotFinite naming rank, step and samples; if updates are skipped, this rank prints a message
        instead."""
        before, self._looked_at = self._looked_at, step
        if math.isfinite(loss):
            return
        told = describe_loss(loss, step, indices, batch)
        if self._skipping is not None:
            print(f"fleet_train: {told}; this update is skipped on every rank", file=sys.stderr, flush=True)
            return
        unseen = f" (last checked before: the loss of step {before}, see fetch_frequency)"
        raise NotFinite(
            f"{told}{unseen if before + 1 < step else ''}; this step is not saved, the last checkpoint is unchanged. "
            "Look at these samples, try a lower learning rate or a warm-up, or skip such updates (--on_nan skip)"
        )

    def skipped(self) -> int:
        """Skipped updates since the beginning of the run; with LocalSGD of all ranks together. All ranks call it."""
        if self._skipping is None:
            return 0
        counts: list[int] = fleet.gather(self._skipping.count())
        return sum(counts) if fleet.profile().use_local_sgd else max(counts)


def describe_loss(loss: float, step: int, indices: NDArray[np.int64], batch: Arrays) -> str:
    """Which rank had which loss at which step, over which samples, and which samples were not finite themselves."""
    text = f"the loss of rank {fleet.worker_index()} is {loss} at step {step}; its batch: samples {_listed(indices)}"
    for name, values in batch.items():
        broken = indices[~_finite_per_sample(np.asarray(values))]
        if len(broken):
            text += f"; '{name}' itself is not finite in samples {_listed(broken)}"
    return text


def _finite_per_sample(values: NDArray[Any]) -> NDArray[np.bool_]:
    finite = np.isfinite(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
    return np.asarray(finite.reshape(len(values), -1).all(axis=1))


def _listed(indices: NDArray[Any]) -> str:
    shown = ", ".join(str(index) for index in indices[:_NAMED_SAMPLES].tolist())
    return shown if len(indices) <= _NAMED_SAMPLES else f"{shown} and {len(indices) - _NAMED_SAMPLES} more"
