"""The result of `Trainer.fit`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fleet_train.train.components.evaluation import Evaluation


@dataclass
class Outcome:
    """Equal on all ranks except for the speed. NaN where nothing was trained or evaluated."""

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
    """Since the beginning of the run; in LocalSGD's local steps the sum over the ranks."""

    @property
    def test_loss(self) -> float:
        return math.nan if self.evaluation is None else self.evaluation.loss

    @property
    def test_accuracy(self) -> float:
        return math.nan if self.evaluation is None else self.evaluation.accuracy

    @property
    def samples_per_second(self) -> float:
        """Over all ranks, of the training steps of this call; the time excludes evaluation and checkpoints."""
        return self.samples / self.train_seconds if self.train_seconds else 0.0

    def line(self) -> str:
        """The epoch's one line."""
        accuracy = "" if math.isnan(self.test_accuracy) else f"  test accuracy {self.test_accuracy:.4f}"
        return f"train loss {self.train_loss:.4f}{accuracy}  {self.samples_per_second:.0f} samples/s"
