"""Small networks that between them show what a real one can do to gradients. Built into the current program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

FEATURES = 16
CLASSES = 5


@dataclass(frozen=True)
class Network:
    """``build(features) -> logits``; features are [batch, FEATURES] float32."""

    name: str
    build: Callable[[Any], Any]


def mlp(features: Any) -> Any:
    hidden = F.tanh(nn.Linear(FEATURES, 24)(features))
    return nn.Linear(12, CLASSES)(F.tanh(nn.Linear(24, 12)(hidden)))


def convolution_with_frozen_batch_norm(features: Any) -> Any:
    image = features.reshape([-1, 1, 4, 4])
    norm = nn.BatchNorm2D(6, use_global_stats=True)  # statistics are fixed, scale and shift are trained
    hidden = F.tanh(norm(nn.Conv2D(1, 6, 3, padding=1)(image)))
    return nn.Linear(6 * 16, CLASSES)(hidden.flatten(1))


def shared_weights(features: Any) -> Any:
    shared = nn.Linear(FEATURES, FEATURES)  # its gradient is the sum over two uses
    hidden = F.tanh(shared(F.tanh(shared(features))))
    return nn.Linear(FEATURES, CLASSES)(hidden)


def parameter_without_gradient(features: Any) -> Any:
    nn.Linear(FEATURES, 7)(features)  # not part of the loss
    frozen = nn.Linear(FEATURES, FEATURES)
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    return nn.Linear(FEATURES, CLASSES)(F.tanh(frozen(features)))


def large_and_tiny(features: Any) -> Any:
    hidden = F.tanh(nn.Linear(FEATURES, 600)(features))
    hidden = F.tanh(nn.Linear(600, 500)(hidden))  # 1.2 MB: past the first bucket's bound
    for i in range(4):
        start = nn.initializer.Constant(1.1)
        hidden = hidden * paddle.static.create_parameter([1], "float32", name=f"scale_{i}", default_initializer=start)
    return nn.Linear(500, CLASSES)(hidden)


NETWORKS = [
    Network(build.__name__, build)
    for build in (mlp, convolution_with_frozen_batch_norm, shared_weights, parameter_without_gradient, large_and_tiny)
]


def batches(steps: int, samples: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """``steps`` joint batches: features [samples, FEATURES] float32, labels [samples, 1] int64."""
    random = np.random.default_rng(seed)
    return [
        (
            random.standard_normal((samples, FEATURES)).astype("float32"),
            random.integers(0, CLASSES, (samples, 1)).astype("int64"),
        )
        for _ in range(steps)
    ]
