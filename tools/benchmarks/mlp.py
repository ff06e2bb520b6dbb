"""The fully connected network in numpy: start weights and forward pass. Weights are [inputs, outputs], then a bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.benchmarks.task import CLASSES, Task, Weights


def start_weights(task: Task) -> Weights:
    """He initialisation, smaller in the last layer and inside residual connections; determined by the seed."""
    generator = np.random.default_rng(task.seed)
    weights: Weights = []
    for layer, (inputs, outputs) in enumerate(zip(task.sizes, task.sizes[1:], strict=False)):
        deviation = np.sqrt(2 / inputs) * (0.1 if task.is_skipped(layer) else 0.5 if outputs == CLASSES else 1.0)
        weights.append(generator.standard_normal((inputs, outputs), dtype=np.float32) * np.float32(deviation))
        weights.append(np.zeros(outputs, np.float32))
    return weights


def logits(task: Task, weights: Sequence[NDArray[Any]], features: NDArray[np.float32]) -> NDArray[np.float32]:
    """[samples, 10] of features [samples, 64]."""
    hidden, layers = features, len(weights) // 2
    for layer in range(layers):
        out = hidden @ np.asarray(weights[2 * layer], np.float32) + np.asarray(weights[2 * layer + 1], np.float32)
        if layer < layers - 1:
            out = np.maximum(out, 0)
        hidden = hidden + out if task.is_skipped(layer) else out
    return hidden


def describe(task: Task) -> str:
    layers = f"{task.hidden_layers} ReLU layers of {task.width}"
    return f"{task.sizes[0]} -> {layers}{' with residual connections' if task.residual else ''} -> {CLASSES}"
