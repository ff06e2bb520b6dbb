"""Learning-rate schedules as a pure function of the step: every rank and every resumed run computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fleet_train.errors import FleetTrainError


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the factor of the peak learning rate before that step (0 = the first).

    A linear warm-up, then one of `SCHEDULES` over the rest of the run.
    """

    shape: str
    total_steps: int
    warmup_steps: int = 0
    milestones: tuple[int, ...] = ()
    """Of `step`: the steps from which on the rate is lower. None = a half and three quarters of the rest of the run."""
    decay: float = 0.1
    """Of `step`: the factor at each milestone."""
    power: float = 2.0
    """Of `polynomial`."""

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
        """The same schedule for steps of this many batches, which are the steps of this one."""
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
