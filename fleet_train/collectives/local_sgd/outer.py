"""Momentum over periods of local training: the outer optimizer, which uses the averaged difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of


class OuterOptimizer:
    """Turns the last agreed values and the averaged difference (anchor - average) into the next agreed values.

    ``none``: anchor - difference, plain averaging.
    ``slowmo``: u = m u + difference / rate; anchor - lr * rate * u (Wang, Tantia, Ballas and Rabbat 2019).
    ``diloco``: u = m u + difference; anchor - lr * (difference + m u), Nesterov (Douillard et al. 2023).
    Tensors are flat, [elements], one for each dtype in which means are computed, and equal on every rank.
    """

    def __init__(self, profile: Profile) -> None:
        steps: dict[str, Callable[[list[Any], list[Any], float], list[Any]]]
        steps = {"none": self._plain, "slowmo": self._slowmo, "diloco": self._diloco}
        self._step = entry_of("outer_optimizer", profile.outer_optimizer, steps, "step on real ranks")
        self._lr = profile.outer_lr
        self._momentum = profile.outer_momentum
        self.velocity: list[Any] | None = None

    def step(self, anchor: list[Any], difference: list[Any], rate: float) -> list[Any]:
        """The next agreed values, in the memory of ``anchor``; ``difference`` is overwritten or kept as well.

        ``rate`` is the inner optimizer's learning rate.
        """
        return self._step(anchor, difference, rate)

    def _plain(self, anchor: list[Any], difference: list[Any], _: float) -> list[Any]:
        return [a.subtract_(d) for a, d in zip(anchor, difference, strict=True)]

    def _slowmo(self, anchor: list[Any], difference: list[Any], rate: float) -> list[Any]:
        scale = 1.0 / rate if rate > 0 else 1.0
        velocity = self._push([d.scale_(scale) for d in difference] if scale != 1.0 else difference)
        return [a.subtract_(v * (self._lr / scale)) for a, v in zip(anchor, velocity, strict=True)]

    def _diloco(self, anchor: list[Any], difference: list[Any], _: float) -> list[Any]:
        steps = [p.add_(v * self._momentum) for p, v in zip(difference, self._push(difference), strict=True)]
        return [a.subtract_(one.scale_(self._lr)) for a, one in zip(anchor, steps, strict=True)]

    def _push(self, pushed: list[Any]) -> list[Any]:
        """Add to the velocity and return it."""
        if self.velocity is None:
            self.velocity = [p.clone() for p in pushed]
        else:
            self.velocity = [v.scale_(self._momentum).add_(p) for v, p in zip(self.velocity, pushed, strict=True)]
        return self.velocity
