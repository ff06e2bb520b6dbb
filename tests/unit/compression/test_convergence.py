"""Training on digits with compressed gradients reaches what whole gradients reach (numpy twins, 4 ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fleet_train.plan import Bucket, Gradient
from fleet_train.plan.compression_settings import DgcSettings, PowerSgdSettings
from fleet_train.plan.simulate.compression import DgcSimulation, PowerSgdSimulation, mean

RANKS, SAMPLES_PER_RANK, EPOCHS, RATE, MOMENTUM = 4, 16, 40, 0.05, 0.9
SHAPES = {"w0": (64, 64), "b0": (64,), "w1": (64, 10), "b1": (10,)}
BUCKET = Bucket(0, tuple(Gradient(name, shape, "float32") for name, shape in SHAPES.items()), 0)
SEEDS = (0, 1)
ACCURACY_TOLERANCE = 0.005

Arrays = list[np.ndarray]
Average = Callable[[list[Arrays]], Arrays]


def whole() -> tuple[Average, float]:
    return mean, MOMENTUM


def powersgd(rank: int) -> tuple[Average, float]:
    return PowerSgdSimulation(BUCKET, RANKS, PowerSgdSettings(rank=rank, min_compression=1.0)).step, MOMENTUM


def dgc() -> tuple[Average, float]:
    settings = DgcSettings(rampup_step=60, sparsity=(0.75, 0.9375, 0.984375), min_elements=100)
    return DgcSimulation(BUCKET, RANKS, settings).step, 0.0


def gradients(weights: Arrays, features: np.ndarray, labels: np.ndarray) -> Arrays:
    w0, b0, w1, b1 = weights
    hidden = np.maximum(features @ w0 + b0, 0)
    scores = hidden @ w1 + b1
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = (scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[labels]) / len(labels)
    inner = (error @ w1.T) * (hidden > 0)
    return [features.T @ inner, inner.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


def accuracy(average: Average, momentum: float, seed: int) -> float:
    random = np.random.default_rng(seed)
    digits: Any = load_digits()
    order = random.permutation(len(digits.target))
    features, labels = digits.data[order] / 16.0, digits.target[order]
    tested, trained = slice(0, 500), np.arange(500, len(labels))
    weights = [random.standard_normal(shape) * np.sqrt(2 / shape[0]) * (len(shape) > 1) for shape in SHAPES.values()]
    velocities = [np.zeros(shape) for shape in SHAPES.values()]
    for _ in range(EPOCHS):
        random.shuffle(trained)
        for start in range(0, len(trained) - RANKS * SAMPLES_PER_RANK + 1, RANKS * SAMPLES_PER_RANK):
            shares = np.split(trained[start : start + RANKS * SAMPLES_PER_RANK], RANKS)
            update = average([gradients(weights, features[share], labels[share]) for share in shares])
            for weight, velocity, value in zip(weights, velocities, update, strict=True):
                velocity *= momentum
                velocity += value
                weight -= RATE * velocity
    w0, b0, w1, b1 = weights
    scores = np.maximum(features[tested] @ w0 + b0, 0) @ w1 + b1
    return float((scores.argmax(axis=1) == labels[tested]).mean())


@pytest.fixture(scope="module")
def accuracy_of_whole_gradients() -> float:
    return float(np.mean([accuracy(*whole(), seed) for seed in SEEDS]))


@pytest.mark.parametrize(
    "method", [lambda: powersgd(1), lambda: powersgd(4), dgc], ids=["powersgd rank 1", "powersgd rank 4", "dgc"]
)
def test_reaches_the_accuracy_of_whole_gradients(
    method: Callable[[], tuple[Average, float]], accuracy_of_whole_gradients: float
) -> None:
    reached = np.mean([accuracy(*method(), seed) for seed in SEEDS])
    assert accuracy_of_whole_gradients > 0.95
    assert reached > accuracy_of_whole_gradients - ACCURACY_TOLERANCE
