"""The training system: a loop for any static program (`Trainer`), and the reference trainer built on it.

The names are loaded on first use: the command line reads `reference.config` from here without importing Paddle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_train.lazy import load_on_use

if TYPE_CHECKING:
    from fleet_train.train.checkpoint.manager import Checkpoints
    from fleet_train.train.evaluation import Evaluation, Outcome, ProgramEvaluator
    from fleet_train.train.numerics import SkipNotFinite, WeightAverage
    from fleet_train.train.settings import TrainerSettings
    from fleet_train.train.trainer import Trainer

__all__ = [
    "Checkpoints",
    "Evaluation",
    "Outcome",
    "ProgramEvaluator",
    "SkipNotFinite",
    "Trainer",
    "TrainerSettings",
    "WeightAverage",
]

__getattr__ = load_on_use(
    __name__,
    {
        "Checkpoints": "checkpoint.manager",
        "Evaluation": "evaluation",
        "Outcome": "evaluation",
        "ProgramEvaluator": "evaluation",
        "SkipNotFinite": "numerics",
        "Trainer": "trainer",
        "TrainerSettings": "settings",
        "WeightAverage": "numerics",
    },
)
