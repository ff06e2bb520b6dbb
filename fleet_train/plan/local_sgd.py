"""When LocalSGD averages: pure arithmetic, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of


@dataclass
class LocalSgdSchedule:
    """Counts local steps and says when a period ends. Steps count from 1.

    Schedules: constant; doubling 1, 2, 4 .. ``steps``; adaptive (AdaComm, Wang and Joshi 2018).
    """

    warm_steps: int
    steps: int
    kind: str = "constant"
    max_steps: int = 64
    period: int = field(default=0, init=False)
    local_steps: int = 0
    first_rate: float = 0.0
    first_loss: float = 0.0
    fragments: int = 1
    """Parts of the parameters that are averaged in turn, each once in a period; only with a constant period."""

    def __post_init__(self) -> None:
        first = {"constant": self.steps, "doubling": 1, "adaptive": self.steps}
        self.period = entry_of("local_sgd_schedule", self.kind, first, "schedule of averagings")

    @classmethod
    def of(cls, profile: Profile) -> LocalSgdSchedule:
        return cls(
            profile.local_sgd_is_warm_steps,
            profile.local_sgd_steps,
            profile.local_sgd_schedule,
            profile.local_sgd_max_steps,
            fragments=profile.local_sgd_fragments,
        )

    def is_synchronous(self, step: int) -> bool:
        """Whether gradients are averaged in this step."""
        return step <= self.warm_steps

    def count(self) -> int | None:
        """Count one local step; returns the fragment that is averaged after it, if any: at a period's end, the last
        one.

        Fragments are spread evenly over a period.
        """
        self.local_steps += 1
        if self.local_steps >= self.period:
            return self.fragments - 1
        due = [fragment for fragment in range(self.fragments) if self.local_steps == self._ends_at(fragment)]
        return due[0] if due else None

    def _ends_at(self, fragment: int) -> int:
        return (fragment + 1) * self.period // self.fragments

    def begin_period(self) -> None:
        """Called when an averaging has started: after a period's last one, start the next period. For an adaptive
        schedule, call ``adapt`` before the next count."""
        if self.local_steps < self.period:
            return
        self.local_steps = 0
        if self.kind == "doubling":
            self.period = min(2 * self.period, self.steps)

    def adapt(self, rate: float, loss: float) -> None:
        """Choose the length of the current period from the learning rate and the ranks' mean loss."""
        self.period = self._adapted(rate, loss)

    def _adapted(self, rate: float, loss: float) -> int:
        if self.first_rate <= 0.0:
            self.first_rate, self.first_loss = rate, max(loss, 1e-12)
        if not (rate > 0.0 and math.isfinite(loss)):
            return self.period
        growth = math.sqrt(self.first_rate / rate * max(loss, 0.0) / self.first_loss)
        return max(1, min(self.max_steps, math.ceil(growth * self.steps)))

    def numbers(self) -> list[float]:
        """The state that a resumed run needs."""
        return [float(self.period), float(self.local_steps), self.first_rate, self.first_loss]

    def take(self, numbers: list[float]) -> None:
        """Continue from the result of ``numbers``."""
        self.period, self.local_steps = int(numbers[0]), int(numbers[1])
        self.first_rate, self.first_loss = numbers[2], numbers[3]
