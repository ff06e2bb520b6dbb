"""Long training on digits, simulated on 4 ranks: compressed gradients reach what uncompressed ones reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fleet_train.cluster import Cluster
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.simulate import Local, Momentum, SimulatedJob
from fleet_train.profile import Profile

RANKS, SAMPLES_PER_RANK, EPOCHS, RATE = 4, 16, 40, 0.05
SHAPES = {"w0": (64, 64), "b0": (64,), "w1": (64, 10), "b1": (10,)}
GRADIENTS = [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]
SEEDS = (0, 1)
ACCURACY_TOLERANCE = 0.005
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "powersgd rank 1": {"compression": "powersgd", "powersgd_min_compression": 1.0},
    "powersgd rank 4": {"compression": "powersgd", "powersgd_min_compression": 1.0, "powersgd_rank": 4},
    "dgc": {"compression": "dgc", "dgc_sparsity": 0.984375, "dgc_rampup_steps": 60, "dgc_min_elements": 100},
}

Values = Mapping[str, np.ndarray]


def gradients(weights: Values, features: np.ndarray, labels: np.ndarray) -> Local:
    hidden = np.maximum(features @ weights["w0"] + weights["b0"], 0)
    scores = hidden @ weights["w1"] + weights["b1"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = (scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[labels]) / len(labels)
    inner = (error @ weights["w1"].T) * (hidden > 0)
    found = {"w0": features.T @ inner, "b0": inner.sum(axis=0), "w1": hidden.T @ error, "b1": error.sum(axis=0)}
    return Local({name: value.astype("float32") for name, value in found.items()})


def accuracy(settings: dict[str, Any], seed: int) -> float:
    random = np.random.default_rng(seed)
    digits: Any = load_digits()
    order = random.permutation(len(digits.target))
    features, labels = digits.data[order] / 16.0, digits.target[order]
    tested, trained = slice(0, 500), np.arange(500, len(labels))
    start = {
        name: (random.standard_normal(shape) * np.sqrt(2 / shape[0]) * (len(shape) > 1)).astype("float32")
        for name, shape in SHAPES.items()
    }
    profile = Profile(**settings)
    job = SimulatedJob(build_plan(GRADIENTS, Cluster.imagined(RANKS, 1), profile), profile, start, Momentum, RATE)
    joint = RANKS * SAMPLES_PER_RANK
    for _ in range(EPOCHS):
        random.shuffle(trained)
        for first in range(0, len(trained) - joint + 1, joint):
            batch = trained[first : first + joint].reshape(RANKS, SAMPLES_PER_RANK)
            job.step(lambda rank, weights, batch=batch: gradients(weights, features[batch[rank]], labels[batch[rank]]))
    w = job.ranks[0]
    scores = np.maximum(features[tested] @ w["w0"] + w["b0"], 0) @ w["w1"] + w["b1"]
    return float((scores.argmax(axis=1) == labels[tested]).mean())


@pytest.fixture(scope="module")
def accuracy_of_whole_gradients() -> float:
    return float(np.mean([accuracy({}, seed) for seed in SEEDS]))


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_reaches_the_accuracy_of_whole_gradients(name: str, accuracy_of_whole_gradients: float) -> None:
    reached = np.mean([accuracy(COMPRESSIONS[name], seed) for seed in SEEDS])
    assert accuracy_of_whole_gradients > 0.95
    assert reached > accuracy_of_whole_gradients - ACCURACY_TOLERANCE
