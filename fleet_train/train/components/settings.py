"""The settings of a `Trainer`. Imports no Paddle."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_train.errors import FleetTrainError

DEFAULT_CHECKPOINT_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class TrainerSettings:
    """Durations, intervals, and the seed."""

    epochs: int
    """Passes over the training data in the whole run."""
    seed: int = 0
    """Start of the random streams of dropout: one per rank and batch."""
    evaluate_every: int = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    checkpoint_every: int = 0
    """Epochs between two checkpoints. 0 = only at the end."""
    checkpoint_every_steps: int = 0
    """Steps between two checkpoints within epochs. 0 = none."""
    log_every: int = 10
    """Steps between two metric records."""
    straggler_factor: float = 1.5
    """A rank is reported when its steps take this many times the median of the others. 0 = never."""
    stop_after_epochs: int | None = None
    """Epochs in this call; a later call with resume continues. None = all remaining ones."""
    resume_uncompared: bool = False
    """Also continue from a checkpoint of several ranks whose values were not compared (divergence_check_steps: 0)."""

    accept_changed_data: bool = False
    """Resume on other training data than the checkpoint's, which is otherwise refused."""

    def __post_init__(self) -> None:
        for name in ("epochs", "evaluate_every", "log_every"):
            at_least(name, getattr(self, name), 1)
        for name in ("seed", "checkpoint_every", "checkpoint_every_steps", "straggler_factor"):
            at_least(name, getattr(self, name), 0)
        if self.stop_after_epochs is not None:
            at_least("stop_after_epochs", self.stop_after_epochs, 1)


def at_least(name: str, value: float, minimum: float) -> None:
    """Raise FleetTrainError unless value >= minimum (false for NaN)."""
    if not value >= minimum:
        raise FleetTrainError(f"--{name} {value}: must be at least {minimum}")
