"""Evaluation divided over the ranks: exact sums, each sample counted once, for any shard sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_train import fleet
from fleet_train.data import Loader
from fleet_train.train.components.mistakes import Mistake, worst


@dataclass(frozen=True)
class Evaluation:
    """Means over all samples of a dataset, equal on every rank."""

    values: dict[str, float]
    """By name, such as `loss` and `accuracy`."""
    num_samples: int
    confusion: NDArray[np.int64] | None = None
    """Counts [classes, classes]: row = true class, column = predicted class. None if not requested."""
    mistakes: list[Mistake] = field(default_factory=list)
    """From rank 0's share, on rank 0 only: misclassified images, the most confident first."""

    @property
    def loss(self) -> float:
        return self.values.get("loss", math.nan)

    @property
    def accuracy(self) -> float:
        return self.values.get("accuracy", math.nan)


class Evaluator(Protocol):
    """The interface that a `Trainer` calls after an epoch, on all ranks, once their parameters are equal."""

    def __call__(self, exe: Any) -> Evaluation: ...


class ProgramEvaluator:
    """Runs a static program over a dataset.

    Args:
        program: reads the trained parameters by name; made under `paddle.utils.unique_name.guard()` like the training
            program, with `layer.eval()`. It has no collectives: ranks may have different numbers of batches.
        sums: name -> program value with one element: the sum over the samples of a batch. The result is the mean.
        loader: feeds of this rank's share; over all ranks each sample once.
        confusion: program value [classes, classes] with the counts of a batch, row = true class; None = not counted.
        probabilities: program value [batch, classes], to find mistakes in feeds `features`, `labels`; None = not looked
            for.
    """

    def __init__(
        self,
        program: Any,
        sums: Mapping[str, Any],
        loader: Loader,
        confusion: Any = None,
        probabilities: Any = None,
    ) -> None:
        self._program = program
        self._sums = dict(sums)
        self._confusion = [] if confusion is None else [confusion]
        # One rank reports: the others need not fetch them.
        self._probabilities = [] if probabilities is None or not fleet.is_first_worker() else [probabilities]
        self._loader = loader

    def __call__(self, exe: Any) -> Evaluation:
        # float64 holds counts exactly up to 2**53.
        totals = np.zeros(len(self._sums) + 1, dtype=np.float64)
        confusions = [np.zeros(value.shape, dtype=np.int64) for value in self._confusion]
        mistakes: list[Mistake] = []
        fetches = [*self._sums.values(), *self._confusion, *self._probabilities]
        with self._loader.epoch(0) as batches:
            for step, feed in enumerate(batches):
                fetched = iter(exe.run(self._program, feed=feed, fetch_list=fetches))
                sums = [float(value.item()) for value in islice(fetched, len(self._sums))]
                totals += [*sums, len(self._loader.indices(step))]
                for confusion in confusions:
                    confusion += next(fetched).astype(np.int64)
                for probabilities in fetched:
                    mistakes = worst(mistakes, feed, probabilities)
        *sums, count = fleet.all_reduce(totals, op="sum").tolist()
        values = {name: total / count for name, total in zip(self._sums, sums, strict=True)}
        summed = [fleet.all_reduce(confusion, op="sum") for confusion in confusions]
        return Evaluation(values, int(count), summed[0] if summed else None, mistakes)
