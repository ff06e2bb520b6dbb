"""Evaluation divided over the ranks: exact sums, each sample counted once, for any shard sizes; a run's outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_train import fleet
from fleet_train.data import Loader

MOST = 24


@dataclass(frozen=True)
class Mistake:
    """An image that an evaluation misclassified: those with the most confidence show wrong labels and hard classes."""

    image: NDArray[np.float32]
    """[channels, height, width], the network's input."""
    true_class: int
    predicted_class: int
    confidence: float
    """The probability of the predicted class."""


@dataclass(frozen=True)
class Evaluation:
    """Means over all samples of a dataset, equal on every rank."""

    values: dict[str, float]
    """The means by name, such as `loss` and `accuracy`."""
    num_samples: int
    confusion: NDArray[np.int64] | None = None
    """Counts [classes, classes]: row = true class, column = predicted class. None if not requested."""
    mistakes: list[Mistake] = field(default_factory=list)
    """Misclassified images from rank 0's share, on rank 0 only, the most confident first."""

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


def worst(mistakes: Sequence[Mistake], feed: Mapping[str, Any], probabilities: NDArray[np.float32]) -> list[Mistake]:
    """Choose at most 24 of `mistakes` and those of one more batch, the most confident first.

    `feed`: `features` [batch, channels, height, width], `labels` [batch]; `probabilities`: [batch, classes]. Features
    that are not images (another number of dimensions, or neither 1 nor 3 channels) give none.
    """
    images, labels = np.asarray(feed["features"]), np.asarray(feed["labels"]).reshape(-1)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        return []
    predicted = probabilities.argmax(axis=1)
    wrong = [
        Mistake(images[index].copy(), int(labels[index]), int(predicted[index]), float(probabilities[index].max()))
        for index in np.flatnonzero(predicted != labels)
    ]
    return sorted([*mistakes, *wrong], key=lambda mistake: -mistake.confidence)[:MOST]


@dataclass
class Outcome:
    """The outcome of a run, equal on all ranks except for the speed. NaN where nothing was trained or evaluated."""

    steps: int = 0
    epochs: int = 0
    train_loss: float = math.nan
    """Mean of the fetched losses of the last epoch, over all ranks; without those that were not finite."""
    evaluation: Evaluation | None = None
    """The last evaluation."""
    samples: int = 0
    train_seconds: float = 0.0
    checkpoint: Path | None = None
    skipped_updates: int = 0
    """Updates skipped since the beginning of the run; in LocalSGD's local steps the sum over the ranks."""

    @property
    def test_loss(self) -> float:
        return math.nan if self.evaluation is None else self.evaluation.loss

    @property
    def test_accuracy(self) -> float:
        return math.nan if self.evaluation is None else self.evaluation.accuracy

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all ranks, of the training steps of this call, without evaluation and checkpoints."""
        return self.samples / self.train_seconds if self.train_seconds else 0.0

    def line(self) -> str:
        """The epoch's one line."""
        accuracy = "" if math.isnan(self.test_accuracy) else f"  test accuracy {self.test_accuracy:.4f}"
        return f"train loss {self.train_loss:.4f}{accuracy}  {self.samples_per_second:.0f} samples/s"
