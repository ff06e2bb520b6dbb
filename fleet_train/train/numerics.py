"""Numbers of a training: what is done about NaN and infinity, a moving average of the weights, random streams.

Random streams depend only on (seed, rank, step): dropout at step N of rank R draws the same mask in an uninterrupted
and in a resumed run, on any number of machines, so that a checkpoint needs no generator state. The average is kept in
the program: checkpoints contain it, and a resumed run continues it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from fleet_train import fleet
from fleet_train.convert import process
from fleet_train.convert.passes.program import persistable
from fleet_train.convert.passes.skipping import SkipNotFinite as SkipNotFinite
from fleet_train.convert.passes.skipping import finite_rows, untrained_floats_of
from fleet_train.convert.saving import whole_on_every_rank
from fleet_train.data.datasets import Arrays
from fleet_train.errors import ConversionError, NotFinite, ProfileError
from fleet_train.log import logger
from fleet_train.profile import Profile

Pairs = list[tuple[Any, Any]]
_NAMED_SAMPLES = 64
# Paddle's switches for kernels whose results depend on timing. A build without a GPU has none of them: its kernels give
# the same bits in every run anyway.
_DETERMINISTIC = {
    "FLAGS_cudnn_deterministic": True,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_embedding_deterministic": 1,
}


def refuse_to_skip_with(profile: Profile) -> None:
    """Raise ProfileError for a profile whose periods would follow from NaN."""
    if profile.use_local_sgd and profile.local_sgd_schedule == "adaptive":
        raise ProfileError(
            "--on_nan skip with local_sgd_schedule: adaptive: its next period is computed from the loss, which would "
            "be NaN; use --on_nan stop, or a constant or doubling schedule"
        )


def refuse_unlike_batches(last_batch: str, profile: Profile) -> None:
    """Raise ProfileError for ranks with unlike numbers of samples whose gradients would count alike."""
    if last_batch == "exact" and profile.average_over != "samples":
        raise ProfileError(
            f"--last_batch exact with average_over: {profile.average_over}: ranks' last batches differ by a sample, "
            "and their gradients would count alike; use average_over: samples, or --last_batch merge"
        )


def describe_statistics(program: Any) -> str | None:
    """A note on batch norm's statistics in this job, or None."""
    if fleet.worker_num() == 1 or not untrained_floats_of(program):
        return None
    if fleet.profile().sync_batch_norm:
        return "batch norm: over the batches of all ranks (sync_batch_norm)"
    if fleet.profile().use_local_sgd:
        return "batch norm: each rank over its own batch; running statistics are averaged with the parameters"
    return "batch norm: each rank over its own batch; running statistics are averaged for evaluations and checkpoints"


class LossWatch:
    """Checks this rank's fetched losses and reacts to one that is not finite."""

    def __init__(self, skipping: SkipNotFinite | None) -> None:
        self._skipping = skipping
        self._last_checked = 0

    def check(self, loss: float, step: int, indices: NDArray[np.int64], batch: Arrays) -> None:
        """Raise NotFinite naming rank, step and samples; if updates are skipped, this rank prints a message instead."""
        before, self._last_checked = self._last_checked, step
        if math.isfinite(loss):
            return
        text = describe_loss(loss, step, indices, batch)
        if self._skipping is not None:
            logger.warning("%s; this update is skipped on every rank", text)
            return
        unseen = f" (last checked before: the loss of step {before}, see fetch_frequency)"
        raise NotFinite(
            f"{text}{unseen if before + 1 < step else ''}; this step is not saved, the last checkpoint is unchanged. "
            "Look at these samples, try a lower learning rate or a warm-up, or skip such updates (--on_nan skip)"
        )

    def skipped(self) -> int:
        """Skipped updates since the beginning of the run; with LocalSGD of all ranks together. All ranks call it."""
        if self._skipping is None:
            return 0
        counts: list[int] = fleet.gather(self._skipping.count())
        return sum(counts) if fleet.profile().use_local_sgd else max(counts)


def describe_loss(loss: float, step: int, indices: NDArray[np.int64], batch: Arrays) -> str:
    """Say which rank had which loss at which step, over which samples, and which samples were not finite themselves."""
    return f"the loss of rank {fleet.worker_index()} is {loss} at step {step}; {_batch_in_words(indices, batch)}"


@contextmanager
def naming_batch(indices: NDArray[np.int64], batch: Arrays) -> Iterator[None]:
    """An error of the body about a gradient that is not finite says which samples the batch has."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{error}; {_batch_in_words(indices, batch)}") from None


def _batch_in_words(indices: NDArray[np.int64], batch: Arrays) -> str:
    text = f"its batch: samples {_listed(indices)}"
    for name, values in batch.items():
        broken = indices[~finite_rows(np.asarray(values))]
        if len(broken):
            text += f"; '{name}' itself is not finite in samples {_listed(broken)}"
    return text


def _listed(indices: NDArray[Any]) -> str:
    shown = ", ".join(str(index) for index in indices[:_NAMED_SAMPLES].tolist())
    return shown if len(indices) <= _NAMED_SAMPLES else f"{shown} and {len(indices) - _NAMED_SAMPLES} more"


class WeightAverage:
    """The weights' moving average, average * decay + (1 - decay) * weights after every update, for all parameters that
    are trained.

    It starts at zero and is read divided by 1 - decay**updates, so that early averages are unbiased. Updates
    that are skipped, and micro-batches without one, do not count. With LocalSGD each rank averages its own weights; the
    mean of these averages, which is read, is the average of the mean weights. Source: Polyak and Juditsky 1992; the
    correction is that of Kingma and Ba 2015.
    """

    def __init__(self, decay: float) -> None:
        if not 0 < decay < 1:
            raise ConversionError(f"decay={decay} of a weight average: it must be above 0 and below 1")
        self.decay = decay
        self._names: dict[str, str] = {}
        self._updates = ""
        self._program: Any = None

    def follow(self, update: Callable[[Pairs], Any], pairs: Pairs) -> Any:
        """Update the parameters, and then the average; for `DistributedOptimizer.around_update`."""
        operators = update(pairs)
        for parameter, gradient in pairs:
            if gradient is None:
                continue
            average = persistable(f"{parameter.name}@average", parameter.dtype, parameter.shape)
            paddle.assign(average * self.decay + parameter * (1.0 - self.decay), average)
            self._names[parameter.name] = average.name
        updates = persistable("weight_average_updates", paddle.int64)
        paddle.assign(updates + 1, updates)
        self._updates, self._program = updates.name, paddle.static.default_main_program()
        return operators

    follow.is_for_owners = True  # type: ignore[attr-defined]

    def weights(self) -> dict[str, NDArray[Any]]:
        """The averaged weights by parameter, equal on every rank. All ranks call it."""
        return whole_on_every_rank(self._of_this_rank(), self._program)

    def _of_this_rank(self) -> dict[str, NDArray[Any]]:
        updates = int(_read(self._updates).item())
        if updates == 0:
            return {parameter: _read(parameter) for parameter in self._names}
        correction = 1.0 - self.decay**updates
        averages = {parameter: _read(name) for parameter, name in self._names.items()}
        return {name: (each / correction).astype(each.dtype) for name, each in averages.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the program's parameters are the averaged weights; afterwards they are restored."""
        averaged = self.weights()
        trained = {name: _read(name) for name in averaged}
        _write(averaged)
        try:
            yield
        finally:
            _write(trained)


def _read(name: str) -> NDArray[Any]:
    return np.array(paddle.static.global_scope().find_var(name).get_tensor())


def _write(arrays: dict[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        paddle.static.global_scope().find_var(name).get_tensor().set(array, fleet.place())


def stream_seed(seed: int, rank: int, step: int) -> int:
    """A 63-bit seed; neighbouring ranks and steps give unrelated ones (which seed + rank would not)."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_process(seed: int, rank: int) -> None:
    """Seed Python's and numpy's global generators, differently on each rank, for code that still uses them."""
    own = stream_seed(seed, rank, 0)
    random.seed(own)
    np.random.seed(own % 2**32)


def use_deterministic_kernels() -> list[str]:
    """Set the switches that the installed Paddle has; returns their names."""
    known = paddle.base.core.globals().keys()
    flags = {name: value for name, value in _DETERMINISTIC.items() if name in known}
    if flags:
        process.set_flags(flags)
    return sorted(flags)
