"""The settings of a `Trainer`, the learning-rate schedules, and the networks of `--model`.

Imports no Paddle: the command line's help lists them. A schedule is a pure function of the step: every rank and every
resumed run computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fleet_train.errors import FleetTrainError


@dataclass(frozen=True)
class TrainerSettings:
    """Durations, intervals, and the seed."""

    epochs: int
    """Passes over the training data in the whole run."""
    seed: int = 0
    """Start of the random streams of dropout: one per rank and batch."""
    evaluate_every: int = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    checkpoint_every: int = 1
    """Epochs between two checkpoints. 0 = only at the end, and when the training is asked to stop."""
    checkpoint_every_steps: int = 0
    """Steps between two checkpoints within epochs. 0 = none."""
    log_every: int = 10
    """Steps between two metric records."""
    straggler_factor: float = 1.5
    """A rank is reported when its steps take this many times the median of the others. 0 = never."""
    stop_after_epochs: int | None = None
    """Epochs in this call; a later call with resume continues. None = all remaining ones."""
    resume_uncompared: bool = False
    """Whether to continue also from a checkpoint of several ranks whose values were not compared
    (divergence_check_steps: 0)."""

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


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the factor of the peak learning rate before that step (0 = the first).

    A linear warm-up, then one of `SCHEDULES` over the rest of the run.
    """

    shape: str
    total_steps: int
    warmup_steps: int = 0
    milestones: tuple[int, ...] = ()
    """Steps from which on the rate of the shape `step` is lower. () = at a half and three quarters of the rest."""
    decay: float = 0.1
    """The factor of the shape `step` at each milestone."""
    power: float = 2.0
    """The power of the shape `polynomial`."""

    def __post_init__(self) -> None:
        if self.milestones and self.shape != "step":
            raise FleetTrainError(f"--lr_milestones belong to --lr_schedule step, not to {self.shape}")
        if list(self.milestones) != sorted(set(self.milestones)) or any(step <= 0 for step in self.milestones):
            raise FleetTrainError(f"milestones {list(self.milestones)}: they must rise and be above 0")
        if not 0 < self.decay < 1:
            raise FleetTrainError(f"--lr_decay {self.decay}: must be above 0 and below 1")
        if not self.power > 0:
            raise FleetTrainError(f"--lr_power {self.power}: must be above 0")

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return _SHAPES[self.shape](self, step)

    def of_updates(self, batches: int) -> Schedule:
        """This schedule for steps of so many batches each, where its own steps are the batches."""
        milestones = {max(1, round(milestone / batches)) for milestone in self.milestones}
        return replace(
            self,
            total_steps=self.total_steps // batches,
            warmup_steps=round(self.warmup_steps / batches),
            milestones=tuple(sorted(milestones)),
        )

    def progress(self, step: int) -> float:
        """Finished share of the run after the warm-up, 0 to 1."""
        rest = max(1, self.total_steps - self.warmup_steps)
        return min(1.0, (step - self.warmup_steps) / rest)


def _step(schedule: Schedule, step: int) -> float:
    if schedule.milestones:
        passed = sum(step >= milestone for milestone in schedule.milestones)
    else:
        passed = sum(schedule.progress(step) >= share for share in (0.5, 0.75))
    return schedule.decay**passed


_SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": lambda schedule, step: 1.0,  # noqa: ARG005
    "cosine": lambda schedule, step: 0.5 * (1.0 + math.cos(math.pi * schedule.progress(step))),
    "linear": lambda schedule, step: 1.0 - schedule.progress(step),
    "polynomial": lambda schedule, step: (1.0 - schedule.progress(step)) ** schedule.power,
    "step": _step,
}
SCHEDULES = tuple(_SHAPES)


# Our name -> the function in paddle.vision.models. Only networks with one output that take any image size from 32 on:
# GoogLeNet and Inception have several outputs, AlexNet is made for 224 only.
VISION_MODELS = {
    **{f"ResNet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    **{f"ResNeXt{depth}_{cut}": f"resnext{depth}_{cut}" for depth in (50, 101, 152) for cut in ("32x4d", "64x4d")},
    **{f"WideResNet{depth}_2": f"wide_resnet{depth}_2" for depth in (50, 101)},
    "MobileNetV1": "mobilenet_v1",
    "MobileNetV2": "mobilenet_v2",
    "MobileNetV3Small": "mobilenet_v3_small",
    "MobileNetV3Large": "mobilenet_v3_large",
    "ShuffleNetV2": "shufflenet_v2_x1_0",
    **{f"VGG{depth}": f"vgg{depth}" for depth in (11, 13, 16, 19)},
    **{f"DenseNet{depth}": f"densenet{depth}" for depth in (121, 161, 169, 201, 264)},
}
MODELS = ("mlp", "cnn", *VISION_MODELS)
