"""The tasks: network, hyperparameters, data order and batches, the same for all contestants. numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fleet_train.data.datasets import ArrayDataset, digits

Weights = list[NDArray[np.float32]]
MLP, RESNET18 = "mlp", "resnet18"
CLASSES = 10
_PIXELS = 8


@dataclass(frozen=True)
class Task:
    """One training job on scikit-learn's digits, with SGD and a constant learning rate.

    ``name``: in ``TASKS``. ``network``: ``mlp`` (``hidden_layers``, ``width``, ``residual``) on 64 features, or
    ``resnet18`` on images of [1, ``image_pixels``, ``image_pixels``], each of the 8 x 8 pixels repeated.
    """

    name: str = "mlp"
    network: str = MLP
    hidden_layers: int = 8
    width: int = 640
    residual: bool = False  # h + relu(layer(h)) if the shapes allow, so that a very deep network trains
    image_pixels: int = 32
    learning_rate: float = 0.01
    momentum: float = 0.9
    global_batch_size: int = 128
    steps: int = 200
    warmup_steps: int = 16  # steps that are trained but not measured
    evaluate_every: int = 8
    target: float = 0.95  # test accuracy that is reached within the steps
    seed: int = 0

    @property
    def sizes(self) -> list[int]:
        """Sizes of the layers of an ``mlp``, including inputs and outputs."""
        return [_PIXELS * _PIXELS, *[self.width] * self.hidden_layers, CLASSES]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        if self.network == MLP:
            return (_PIXELS * _PIXELS,)
        return (1, self.image_pixels, self.image_pixels)

    def is_skipped(self, layer: int) -> bool:
        """Whether layer ``layer`` of an ``mlp`` has a connection around it."""
        return self.residual and self.sizes[layer] == self.sizes[layer + 1]


# The last is for step times only: a network so deep does not learn in so few steps. ResNet-18's batch is meant to
# let computing on one core take about as long as its gradients take at 1 Gb/s (0.36 s).
TASKS = {
    "mlp": Task(),
    "resnet18": Task(
        name="resnet18",
        network=RESNET18,
        learning_rate=0.03,
        global_batch_size=32,
        steps=200,
        warmup_steps=8,
        evaluate_every=20,
        target=0.85,
    ),
    "small_tensors": Task(
        name="small_tensors",
        hidden_layers=79,
        width=32,
        residual=True,
        learning_rate=0.005,
        steps=72,
        evaluate_every=24,
    ),
}


class Batches:
    """Batches of the training part: every epoch has its own order, determined by the seed."""

    def __init__(self, task: Task, rank: int, world_size: int) -> None:
        if task.global_batch_size % world_size:
            raise ValueError(f"global_batch_size={task.global_batch_size} is not a multiple of {world_size} ranks")
        self._features, self._labels = _digits(cast(ArrayDataset, digits().train))
        self._task = task
        self._share = slice(
            rank * task.global_batch_size // world_size, (rank + 1) * task.global_batch_size // world_size
        )

    def at(self, step: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """This rank's samples [batch, *sample_shape] and labels [batch] of a step."""
        size = self._task.global_batch_size
        epoch, batch = divmod(step, len(self._labels) // size)
        order = np.random.default_rng((self._task.seed, epoch)).permutation(len(self._labels))
        chosen = order[batch * size : (batch + 1) * size][self._share]
        return shaped(self._task, self._features[chosen]), self._labels[chosen]


def samples_to_judge(task: Task) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The 359 test images [359, *sample_shape] and their labels [359]."""
    features, labels = _digits(cast(ArrayDataset, digits().test))
    return shaped(task, features), labels


def shaped(task: Task, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Features [samples, 64] as the task's network takes them: [samples, *sample_shape]."""
    if task.network == MLP:
        return features
    images = features.reshape(-1, 1, _PIXELS, _PIXELS)
    factor = task.image_pixels // _PIXELS
    return images.repeat(factor, axis=2).repeat(factor, axis=3)


def _digits(part: ArrayDataset) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    return part.features.reshape(len(part.labels), -1).astype(np.float32), part.labels
