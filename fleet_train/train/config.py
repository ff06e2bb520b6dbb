"""What was asked of the reference trainer. Imports no Paddle: the command line takes help and checks from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fleet_train.errors import FleetTrainError
from fleet_train.train.schedules import SCHEDULES
from fleet_train.train.settings import TrainerSettings, at_least

MODELS = ("mlp", "cnn")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
# A sensible first try on the digits for each optimizer, used when no rate is given.
DEFAULT_LEARNING_RATES = {"sgd": 0.2, "momentum": 0.1, "adam": 0.002, "adamw": 0.002}


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Sizes are per rank unless the name says global."""

    model: str = "cnn"
    data: str = "digits"
    augment: str = "none"
    """Random change of training batches, from fleet_train.data.AUGMENTATIONS."""
    strategy: str | None = None
    """Profile name or file. None = the launcher's, else single_node or multi_node by what the cluster is."""
    epochs: int = 20
    batch_size: int = 32
    """Samples per rank and step."""
    learning_rate: float | None = None
    """Peak rate. None = the optimizer's entry in DEFAULT_LEARNING_RATES."""
    scale_lr: bool = False
    """Multiply the rate by the world size (linear scaling: the global batch grows by that factor)."""
    optimizer: str = "momentum"
    weight_decay: float = 0.0
    lr_schedule: str = "cosine"
    warmup_epochs: float = 0.0
    seed: int = 0
    output_dir: str = "runs/train"
    checkpoint_every: int = 0
    """Epochs between two checkpoints. 0 = only at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    evaluate_every: int = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    log_every: int = 10
    """Steps between two metric records."""
    resume: bool = False
    overwrite: bool = False
    """Start anew in an output_dir that holds checkpoints, which are deleted."""
    stop_after_epochs: int | None = None
    """Epochs in this call; a later call with resume goes on. The schedule still spans `epochs`. None = all."""

    def __post_init__(self) -> None:
        _one_of("--model", self.model, MODELS)
        _one_of("--optimizer", self.optimizer, OPTIMIZERS)
        _one_of("--lr_schedule", self.lr_schedule, SCHEDULES)
        for name in ("batch_size", "keep_checkpoints"):
            at_least(name, getattr(self, name), 1)
        for name in ("weight_decay", "warmup_epochs"):
            at_least(name, getattr(self, name), 0)
        self.trainer_settings()  # checks what the loop is asked for
        if self.learning_rate is not None and not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise FleetTrainError(f"--lr {self.learning_rate}: the learning rate must be a finite number above 0")
        if self.resume and self.overwrite:
            raise FleetTrainError("--resume goes on with a run and --overwrite deletes it: give one of them")

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir)

    def peak_learning_rate(self, world_size: int) -> float:
        """The schedule's highest rate on that many ranks."""
        given = self.learning_rate if self.learning_rate is not None else DEFAULT_LEARNING_RATES[self.optimizer]
        return given * world_size if self.scale_lr else given

    def trainer_settings(self) -> TrainerSettings:
        """The loop's part of it: what has the same name there."""
        return TrainerSettings(**{field.name: getattr(self, field.name) for field in fields(TrainerSettings)})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise FleetTrainError(f"{flag} {value!r} is unknown; use one of {', '.join(known)}")
