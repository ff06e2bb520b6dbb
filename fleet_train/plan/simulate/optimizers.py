"""Optimizers of ``paddle.optimizer`` in numpy, written from their definitions. Values and state keep the value's dtype.

A weight decay is Paddle's ``weight_decay=float``: L2, added to the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fleet_train.plan.compression_settings import Array


class NumpyOptimizer(Protocol):
    """One rank's optimizer. ``state``: the state that LocalSGD may average or reset, by kind, then by parameter."""

    state: dict[str, dict[str, Array]]

    def step(self, name: str, value: Array, gradient: Array, rate: float) -> Array:
        """The parameter's next value, of its shape and dtype."""
        ...


@dataclass
class Sgd:
    """value - rate * gradient."""

    weight_decay: float = 0.0
    state: dict[str, dict[str, Array]] = field(default_factory=dict)

    def step(self, name: str, value: Array, gradient: Array, rate: float) -> Array:
        del name
        return (value.astype(np.float64) - rate * (gradient + self.weight_decay * value)).astype(value.dtype)


@dataclass
class Momentum:
    """velocity = momentum * velocity + gradient; value - rate * velocity, or Nesterov's look ahead."""

    momentum: float = 0.9
    use_nesterov: bool = False
    weight_decay: float = 0.0
    state: dict[str, dict[str, Array]] = field(default_factory=lambda: {"velocity": {}})

    def step(self, name: str, value: Array, gradient: Array, rate: float) -> Array:
        pushed = gradient.astype(np.float64) + self.weight_decay * value
        velocity = self.momentum * self.state["velocity"].get(name, np.zeros(value.shape)) + pushed
        self.state["velocity"][name] = velocity.astype(value.dtype)
        ahead = pushed + self.momentum * velocity if self.use_nesterov else velocity
        return np.asarray(value - rate * ahead, dtype=value.dtype)


@dataclass
class Adam:
    """Kingma and Ba 2015, with the bias corrected in the rate and ``epsilon`` scaled with it, as Paddle does.

    ``decoupled_decay``: AdamW's, which scales the value down before the step (Loshchilov and Hutter 2019).
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled_decay: float = 0.0
    state: dict[str, dict[str, Array]] = field(default_factory=lambda: {"moment1": {}, "moment2": {}})
    steps: dict[str, int] = field(default_factory=dict)

    def step(self, name: str, value: Array, gradient: Array, rate: float) -> Array:
        self.steps[name] = number = self.steps.get(name, 0) + 1
        wide, zeros = gradient.astype(np.float64), np.zeros(value.shape)
        first = self.beta1 * self.state["moment1"].get(name, zeros) + (1 - self.beta1) * wide
        second = self.beta2 * self.state["moment2"].get(name, zeros) + (1 - self.beta2) * wide**2
        self.state["moment1"][name], self.state["moment2"][name] = first.astype(value.dtype), second.astype(value.dtype)
        correction = np.sqrt(1 - self.beta2**number)
        scaled = rate * correction / (1 - self.beta1**number)
        change = scaled * first / (np.sqrt(second) + self.epsilon * correction)
        shrunk = value * (1 - rate * self.decoupled_decay)
        return np.asarray(shrunk - change, dtype=value.dtype)
