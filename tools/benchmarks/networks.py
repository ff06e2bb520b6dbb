"""The tasks' networks in numpy: initial weights and the evaluation, the same for all contestants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.benchmarks import mlp, resnet
from tools.benchmarks.task import MLP, Task, Weights, samples_to_judge

_STATISTICS = 2 * len(resnet.convolutions())


def start_weights(task: Task) -> Weights:
    """Of the task's network and seed; running statistics of batch norms among them."""
    return mlp.start_weights(task) if task.network == MLP else resnet.start_weights(task)


def parameters(task: Task) -> tuple[int, int]:
    """The number of trained parameters and of their tensors."""
    weights = start_weights(task)
    tensors, values = len(weights), sum(each.size for each in weights)
    if task.network == MLP:
        return values, tensors
    return values - 2 * sum(each.outputs for each in resnet.convolutions()), tensors - _STATISTICS


def describe(task: Task) -> str:
    network = mlp.describe(task) if task.network == MLP else resnet.describe(task)
    values, tensors = parameters(task)
    return f"{network}: {values:,} parameters, {tensors} tensors"


def judged(task: Task, weights: Sequence[NDArray[Any]]) -> tuple[float, float]:
    """Accuracy and cross entropy on the 359 test images, by the same arithmetic for every contestant."""
    samples, labels = samples_to_judge(task)
    logits = mlp.logits(task, weights, samples) if task.network == MLP else resnet.logits(weights, samples)
    accuracy = float((logits.argmax(axis=1) == labels).mean())
    above = logits - logits.max(axis=1, keepdims=True)
    logarithms = above[np.arange(len(labels)), labels] - np.log(np.exp(above).sum(axis=1))
    return accuracy, float(-logarithms.mean())
