"""Momentum over periods of local training: what is done with the averaged difference."""

from __future__ import annotations

from typing import Any

from fleet_train.profile import Profile


class OuterOptimizer:
    """Turns the last agreed values and the averaged difference (anchor - average) into the next agreed values.

    ``none``: anchor - difference, plain averaging.
    ``slowmo``: u = m u + difference / rate; anchor - lr * rate * u (Wang, Tantia, Ballas and Rabbat 2019).
    ``diloco``: u = m u + difference; anchor - lr * (difference + m u), Nesterov (Douillard et al. 2023).
    All tensors are flat float32 [elements] and equal on every rank.
    """

    def __init__(self, profile: Profile) -> None:
        self._kind = profile.outer_optimizer
        self._lr = profile.outer_lr
        self._momentum = profile.outer_momentum
        self.velocity: Any = None

    def step(self, anchor: Any, difference: Any, rate: float) -> Any:
        """The next agreed values; ``rate`` is the inner optimizer's learning rate."""
        if self._kind == "none":
            return anchor - difference
        scale = 1.0 / rate if self._kind == "slowmo" and rate > 0 else 1.0
        pushed = difference * scale
        self.velocity = pushed if self.velocity is None else self.velocity * self._momentum + pushed
        if self._kind == "slowmo":
            return anchor - self.velocity * (self._lr / scale)
        return anchor - (difference + self.velocity * self._momentum) * self._lr
