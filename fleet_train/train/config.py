"""The settings of the reference trainer. Imports no Paddle: the command line takes help and checks from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.flight.trace import read_steps
from fleet_train.data.images import DEFAULT_MAX_CORRUPT
from fleet_train.data.open import LoaderSettings
from fleet_train.errors import FleetTrainError
from fleet_train.train.settings import (
    MODELS,
    SCHEDULES,
    Schedule,
    TrainerSettings,
    at_least,
)

ON_NAN = ("stop", "skip")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
# A sensible first value on the digits for each optimizer, used if no rate is given.
DEFAULT_LEARNING_RATES = {"sgd": 0.2, "momentum": 0.1, "adam": 0.002, "adamw": 0.002}


@dataclass(frozen=True)
class TrainConfig(TrainerSettings, LoaderSettings):
    """One training run: the loop's and the loaders' settings, and those of what is around them. Sizes are per rank
    unless the name says global.
    """

    model: str = "cnn"
    data: str = "digits"
    data_dir: str | None = None
    """Image folder, used instead of `data`."""
    image_size: int = 224
    """Images of data_dir become [3, image_size, image_size]."""
    max_corrupt: float = DEFAULT_MAX_CORRUPT
    """Unreadable images that are tolerated: below 1 a share of all, from 1 on a number."""
    strategy: str | None = None
    """Profile name or file. None = the launcher's, else single_node or multi_node, by the cluster."""
    epochs: int = 20
    learning_rate: float | None = None
    """Peak rate. None = the optimizer's entry in DEFAULT_LEARNING_RATES."""
    scale_lr: bool = False
    """Multiply the rate by the world size (linear scaling: the global batch grows by that factor)."""
    optimizer: str = "momentum"
    weight_decay: float = 0.0
    no_decay_norm_bias: bool = False
    """Leave parameters with at most one dimension (biases, scales of norms) out of the weight decay."""
    clip_norm: float = 0.0
    """Largest global norm of the averaged gradients; larger ones are scaled down to it. 0 = no clipping."""
    gradient_norm: bool = False
    """Record the global norm of the averaged gradients; with clip_norm it is recorded anyway, except with LocalSGD."""
    label_smoothing: float = 0.0
    """Share of the target distributed over all classes."""
    ema_decay: float = 0.0
    """Decay per update of the weights' moving average, which is then evaluated. 0 = no average."""
    lr_schedule: str = "cosine"
    lr_milestones: tuple[float, ...] = ()
    """Epochs at which the step schedule drops. () = at a half and at three quarters of what follows the warm-up."""
    lr_decay: float = 0.1
    """Factor of the step schedule at each milestone."""
    lr_power: float = 2.0
    """Power of the polynomial schedule."""
    warmup_epochs: float = 0.0
    output_dir: str = "runs/train"
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Whether the checkpoint with the best evaluation is kept as well, however old it is."""
    background_checkpoints: bool = False
    """Write checkpoints in a thread during training."""
    checkpoint_timeout: float = timeouts.CHECKPOINT_SECONDS
    """Longest wait in seconds for a checkpoint being written: a hanging disk must not block the job."""
    checkpoint_copies: int = 1
    """Number of nodes that keep each checkpoint in their own output_dir, including the first one. 1 = only the
    first."""
    on_nan: str = "stop"
    """Reaction to a loss or gradient that is NaN or infinite: stop, or skip the update on every rank."""
    deterministic: bool = False
    """Ask Paddle for kernels that give the same bits in every run; slower on GPUs."""
    trace: str = ""
    """Steps to trace, such as ``100-104``, into the launcher's log folder, or output_dir without one. Empty = none."""
    prometheus_port: int | None = None
    """Port at which rank 0 serves its newest record, for Prometheus. None = no server."""
    prometheus_host: str = "127.0.0.1"
    """Address that the server for Prometheus listens on."""
    resume: bool = False
    overwrite: bool = False
    """Start again in an output_dir with checkpoints, which are deleted after the first new one."""

    def __post_init__(self) -> None:
        choices = {"model": MODELS, "optimizer": OPTIMIZERS, "on_nan": ON_NAN, "lr_schedule": SCHEDULES}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise FleetTrainError(f"--{name} {value!r} is unknown; use one of {', '.join(known)}")
        for name in ("batch_size", "keep_checkpoints", "checkpoint_timeout", "checkpoint_copies"):
            at_least(name, getattr(self, name), 1)
        for name in ("weight_decay", "warmup_epochs", "clip_norm"):
            at_least(name, getattr(self, name), 0)
        for name in ("label_smoothing", "ema_decay"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise FleetTrainError(f"--{name} {value}: must be at least 0 and below 1")
        LoaderSettings.__post_init__(self)
        TrainerSettings.__post_init__(self)
        self.schedule(steps_per_epoch=1)  # checks its own settings
        if self.learning_rate is not None and not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise FleetTrainError(f"--lr {self.learning_rate}: the learning rate must be a finite number above 0")
        if self.trace:
            read_steps(self.trace)
        if self.prometheus_port is None and self.prometheus_host != TrainConfig.prometheus_host:
            raise FleetTrainError("--prometheus_host says where --prometheus_port is served: give the port, too")
        if self.resume and self.overwrite:
            raise FleetTrainError("--resume continues a run and --overwrite deletes it: give only one of them")

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir)

    def peak_learning_rate(self, world_size: int) -> float:
        """The schedule's highest rate on that many ranks."""
        given = self.learning_rate if self.learning_rate is not None else DEFAULT_LEARNING_RATES[self.optimizer]
        return given * world_size if self.scale_lr else given

    def schedule(self, steps_per_epoch: int) -> Schedule:
        """The learning-rate schedule over the whole run, in steps of one batch: see `Schedule.of_updates`."""
        return Schedule(
            self.lr_schedule,
            total_steps=self.epochs * steps_per_epoch,
            warmup_steps=round(self.warmup_epochs * steps_per_epoch),
            milestones=tuple(round(epoch * steps_per_epoch) for epoch in self.lr_milestones),
            decay=self.lr_decay,
            power=self.lr_power,
        )

    @property
    def data_name(self) -> str:
        """The name of the data in messages and reports."""
        return self.data if self.data_dir is None else self.data_dir

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
