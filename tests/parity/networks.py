"""Small networks that cover what real ones do to gradients. Built into the current program."""

from __future__ import annotations

from typing import Any

from paddle import nn
from paddle.nn import functional as F

from fleet_train.selftest.training import CLASSES, FEATURES, Network, large_and_tiny


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


NETWORKS = [
    Network(build.__name__, build)
    for build in (mlp, convolution_with_frozen_batch_norm, shared_weights, parameter_without_gradient, large_and_tiny)
]
