"""The training system: a loop for any static program (`Trainer`), and the reference trainer built on it.

The names are loaded on first use: the command line reads `config` from here without importing Paddle.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleet_train.train.average import WeightAverage
    from fleet_train.train.checkpoint import Checkpoints
    from fleet_train.train.evaluate import Evaluation, ProgramEvaluator
    from fleet_train.train.finite import SkipNotFinite
    from fleet_train.train.loop import Trainer
    from fleet_train.train.outcome import Outcome
    from fleet_train.train.settings import TrainerSettings

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

_HOMES = {
    "Checkpoints": "checkpoint",
    "Evaluation": "evaluate",
    "Outcome": "outcome",
    "ProgramEvaluator": "evaluate",
    "SkipNotFinite": "finite",
    "Trainer": "loop",
    "TrainerSettings": "settings",
    "WeightAverage": "average",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fleet_train.train' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"fleet_train.train.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
