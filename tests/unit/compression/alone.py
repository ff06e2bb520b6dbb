"""A compression method on a job of one rank, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.engine import HAND_OVER, Progress, Stages, carry_out
from fleet_train.collectives.methods.dense import BucketMethod
from fleet_train.plan import Bucket, TensorSpec


class Alone:
    """The allreduce of a job of one rank; counts what passes."""

    def __init__(self) -> None:
        self.elements: list[int] = []

    def sum(self, buffers: Sequence[Any], more: bool = False) -> Stages[list[Any]]:
        del more
        yield HAND_OVER
        self.elements += [buffer.shape[0] for buffer in buffers]
        return list(buffers)


def bucket(*shapes: tuple[int, ...], dtype: str = "float32") -> Bucket:
    return Bucket(0, tuple(TensorSpec(f"w{i}", shape, dtype) for i, shape in enumerate(shapes)), 0)


def step(method: BucketMethod, *gradients: Any) -> list[np.ndarray]:
    tensors = [paddle.to_tensor(np.asarray(gradient, "float32")) for gradient in gradients]
    return [np.array(update.numpy()) for update in carry_out(Progress(method.average(tensors)))]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")
