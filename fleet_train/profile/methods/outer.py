"""Momentum over periods of local training: one class per outer optimizer, and the one list of them.

Each is a formula on the averaged difference (the last agreed values minus the new average). It is written with
operators that numpy's arrays and Paddle's tensors have in common: the ranks compute it in float32, the simulator in
float64. ``tests/unit/plan/test_outer_optimizers.py`` has values computed by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet_train.profile.knobs import entry_of


@dataclass(frozen=True)
class OuterOptimizer:
    """``none``: the agreed values are the average. To add one, write a subclass and list it below."""

    name: str
    words: str = ""
    """What the optimizer is, for the knob's text."""
    source: str = ""

    def step(self, difference: Any, velocity: Any, rate: float, lr: float, momentum: float) -> tuple[Any, Any]:
        """The step after an averaging: (what is subtracted from the last agreed values, the next velocity).
        ``velocity``: None before the first; ``rate``: the inner optimizer's learning rate; ``lr``, ``momentum``:
        `outer_lr` and `outer_momentum`."""
        del rate, lr, momentum
        return difference, velocity


class SlowMo(OuterOptimizer):
    """Slow momentum: u = m u + difference / rate; lr * rate * u (Wang, Tantia, Ballas and Rabbat 2019, algorithm 1)."""

    def step(self, difference: Any, velocity: Any, rate: float, lr: float, momentum: float) -> tuple[Any, Any]:
        scale = 1.0 / rate if rate > 0 else 1.0
        velocity = _new_velocity(velocity, difference * scale if scale != 1.0 else difference, momentum)
        return velocity * (lr / scale), velocity


class DiLoCo(OuterOptimizer):
    """Nesterov's momentum: u = m u + difference; lr * (difference + m u) (Douillard et al. 2023)."""

    def step(self, difference: Any, velocity: Any, rate: float, lr: float, momentum: float) -> tuple[Any, Any]:
        del rate
        velocity = _new_velocity(velocity, difference, momentum)
        return (difference + velocity * momentum) * lr, velocity


def _new_velocity(velocity: Any, difference: Any, momentum: float) -> Any:
    return difference if velocity is None else velocity * momentum + difference


_LISTED = (
    OuterOptimizer("none"),
    SlowMo("slowmo", "slow momentum", "Wang et al. 2019 (SlowMo)"),
    DiLoCo("diloco", "Nesterov on the averaged difference", "Douillard et al. 2023 (DiLoCo)"),
)
OUTER_OPTIMIZERS: dict[str, OuterOptimizer] = {optimizer.name: optimizer for optimizer in _LISTED}
"""All outer optimizers by the value of the knob ``outer_optimizer``."""
WITH_MOMENTUM = tuple(name for name in OUTER_OPTIMIZERS if name != "none")


def outer_optimizer_of(name: str) -> OuterOptimizer:
    """The outer optimizer of a knob's value. Raises ConversionError for an unknown one."""
    return entry_of("outer_optimizer", name, OUTER_OPTIMIZERS, "formula")
