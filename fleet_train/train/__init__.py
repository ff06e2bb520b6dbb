"""The training system: a loop for any static program (`Trainer`), and the reference trainer built on it.

The names are loaded on first use: the command line reads `reference.config` from here without importing Paddle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_train.lazy import load_on_use

if TYPE_CHECKING:
    from fleet_train.train.checkpoint.manager import Checkpoints
    from fleet_train.train.components.ema import WeightAverage
    from fleet_train.train.components.evaluation import Evaluation, ProgramEvaluator
    from fleet_train.train.components.numerics import SkipNotFinite
    from fleet_train.train.components.settings import TrainerSettings
    from fleet_train.train.outcome import Outcome
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
        "Evaluation": "components.evaluation",
        "Outcome": "outcome",
        "ProgramEvaluator": "components.evaluation",
        "SkipNotFinite": "components.numerics",
        "Trainer": "trainer",
        "TrainerSettings": "components.settings",
        "WeightAverage": "components.ema",
    },
)
