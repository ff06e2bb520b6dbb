"""Learning-rate schedules as a pure function of the step: every rank and every resumed run computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


def _constant(progress: float) -> float:
    del progress
    return 1.0


def _step_decay(progress: float) -> float:
    return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01


# Share of the run behind us (0 to 1, after the warm-up) -> factor on the peak rate.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": _constant,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "step": _step_decay,
}
SCHEDULES = tuple(_SHAPES)


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the factor on the peak learning rate before that step (0 = the first)."""

    shape: str
    total_steps: int
    warmup_steps: int = 0

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        rest = max(1, self.total_steps - self.warmup_steps)
        return _SHAPES[self.shape](min(1.0, (step - self.warmup_steps) / rest))
