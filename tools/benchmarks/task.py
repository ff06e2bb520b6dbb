"""What every contestant trains: the same network, start values, data order and batches. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fleet_train.data.datasets import ArrayDataset, digits

Weights = list[NDArray[np.float32]]
_FEATURES, _CLASSES = 64, 10


@dataclass(frozen=True)
class Task:
    """One training job on scikit-learn's digits. Weights are [inputs, outputs] and biases, layer by layer."""

    hidden_layers: int = 8
    width: int = 640
    residual: bool = False  # h + relu(layer(h)) where the shapes allow: a very deep network trains
    learning_rate: float = 0.01
    momentum: float = 0.9
    global_batch_size: int = 128
    steps: int = 136
    warmup_steps: int = 16  # steps that are trained but neither timed nor counted
    evaluate_every: int = 4
    seed: int = 0

    @property
    def sizes(self) -> list[int]:
        return [_FEATURES, *[self.width] * self.hidden_layers, _CLASSES]

    @property
    def parameters(self) -> int:
        return sum(inputs * outputs + outputs for inputs, outputs in zip(self.sizes, self.sizes[1:], strict=False))

    @property
    def tensors(self) -> int:
        return 2 * (self.hidden_layers + 1)

    def is_skipped(self, layer: int) -> bool:
        """Whether layer ``layer`` has a connection around it."""
        return self.residual and self.sizes[layer] == self.sizes[layer + 1]

    def describe(self) -> str:
        layers = f"{self.hidden_layers} ReLU layers of {self.width}"
        around = " with residual connections" if self.residual else ""
        return f"{_FEATURES} -> {layers}{around} -> {_CLASSES}: {self.parameters:,} parameters, {self.tensors} tensors"


# The second is for step times only: a network so deep does not learn in so few steps.
TASKS = {
    "digits_3m": Task(),
    "small_tensors": Task(hidden_layers=79, width=32, residual=True, learning_rate=0.005, steps=72, evaluate_every=24),
}


def start_weights(task: Task) -> Weights:
    """He's start values, smaller in the last layer and inside residual connections; the same for a seed, always."""
    generator = np.random.default_rng(task.seed)
    weights: Weights = []
    for layer, (inputs, outputs) in enumerate(zip(task.sizes, task.sizes[1:], strict=False)):
        deviation = np.sqrt(2 / inputs) * (0.1 if task.is_skipped(layer) else 0.5 if outputs == _CLASSES else 1.0)
        weights.append(generator.standard_normal((inputs, outputs), dtype=np.float32) * np.float32(deviation))
        weights.append(np.zeros(outputs, np.float32))
    return weights


class Batches:
    """Batches of the training part: every epoch in an order of its own, which is the same for a seed."""

    def __init__(self, task: Task, rank: int, world_size: int) -> None:
        if task.global_batch_size % world_size:
            raise ValueError(f"global_batch_size={task.global_batch_size} is not a multiple of {world_size} ranks")
        train = cast(ArrayDataset, digits().train)
        self._features = train.features.reshape(len(train.labels), -1)
        self._labels = train.labels
        self._task = task
        self._share = slice(
            rank * task.global_batch_size // world_size, (rank + 1) * task.global_batch_size // world_size
        )

    def at(self, step: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """This rank's features [batch, 64] and labels [batch] of a step."""
        size = self._task.global_batch_size
        epoch, batch = divmod(step, len(self._labels) // size)
        order = np.random.default_rng((self._task.seed, epoch)).permutation(len(self._labels))
        chosen = order[batch * size : (batch + 1) * size][self._share]
        return self._features[chosen], self._labels[chosen]


def test_accuracy(task: Task, weights: Sequence[NDArray[Any]]) -> float:
    """The share of the 359 test images that a network with these weights gets right; the same arithmetic for all."""
    test = cast(ArrayDataset, digits().test)
    hidden = test.features.reshape(len(test.labels), -1).astype(np.float32)
    layers = len(weights) // 2
    for layer in range(layers):
        out = hidden @ np.asarray(weights[2 * layer], np.float32) + np.asarray(weights[2 * layer + 1], np.float32)
        if layer < layers - 1:
            out = np.maximum(out, 0)
        hidden = hidden + out if task.is_skipped(layer) else out
    return float((hidden.argmax(axis=1) == test.labels).mean())
