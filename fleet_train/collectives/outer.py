"""Momentum over periods of local training: what is done with the averaged difference."""

from __future__ import annotations

from typing import Any

from fleet_train.profile import Profile


class OuterOptimizer:
    """Turns the last agreed values and the averaged difference (anchor - average) into the next agreed values.

    ``none``: anchor - difference, plain averaging.
    ``slowmo``: u = m u + difference / rate; anchor - lr * rate * u (Wang, Tantia, Ballas and Rabbat 2019).
    ``diloco``: u = m u + difference; anchor - lr * (difference + m u), Nesterov (Douillard et al. 2023).
    Tensors are flat, [elements], one for each dtype in which means are taken, and equal on every rank.
    """

    def __init__(self, profile: Profile) -> None:
        self._kind = profile.outer_optimizer
        self._lr = profile.outer_lr
        self._momentum = profile.outer_momentum
        self.velocity: list[Any] | None = None

    def step(self, anchor: list[Any], difference: list[Any], rate: float) -> list[Any]:
        """The next agreed values; ``rate`` is the inner optimizer's learning rate."""
        if self._kind == "none":
            return [a - d for a, d in zip(anchor, difference, strict=True)]
        scale = 1.0 / rate if self._kind == "slowmo" and rate > 0 else 1.0
        pushed = [one * scale for one in difference]
        if self.velocity is not None:
            pushed = [v * self._momentum + p for v, p in zip(self.velocity, pushed, strict=True)]
        self.velocity = pushed
        if self._kind == "slowmo":
            return [a - v * (self._lr / scale) for a, v in zip(anchor, pushed, strict=True)]
        return [a - (d + v * self._momentum) * self._lr for a, d, v in zip(anchor, difference, pushed, strict=True)]
