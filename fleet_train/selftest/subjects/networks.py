"""Small networks and their training batches, the same on every rank."""

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
SAMPLES_PER_RANK = 6

Array = np.ndarray[Any, Any]
Batch = tuple[Array, Array]


@dataclass(frozen=True)
class Network:
    """``build(features) -> logits``; features are [batch, FEATURES] float32."""

    name: str
    build: Callable[[Any], Any]


def large_and_tiny(features: Any) -> Any:
    hidden = F.tanh(nn.Linear(FEATURES, 600)(features))
    hidden = F.tanh(nn.Linear(600, 500)(hidden))  # 1.2 MB: past the first bucket's bound
    for i in range(4):
        start = nn.initializer.Constant(1.1)
        hidden = hidden * paddle.static.create_parameter([1], "float32", name=f"scale_{i}", default_initializer=start)
    return nn.Linear(500, CLASSES)(hidden)


def past_dgc_bound(features: Any) -> Any:
    """One weight of 130 x 130, which DGC selects from. Few enough elements that rounding does not change the choice."""
    hidden = paddle.tanh(paddle.nn.Linear(130, 130)(paddle.tanh(paddle.nn.Linear(FEATURES, 130)(features))))
    return paddle.nn.Linear(130, CLASSES)(hidden)


def with_batch_norm(features: Any) -> Any:
    # no bias: batch norm would remove it, and its gradient is rounding noise
    hidden = paddle.nn.BatchNorm1D(12)(paddle.nn.Linear(FEATURES, 12, bias_attr=False)(features))
    return paddle.nn.Linear(12, 5)(paddle.tanh(hidden))


SEVERAL_BUCKETS = Network("large_and_tiny", large_and_tiny)
SPARSE = Network("past_dgc_bound", past_dgc_bound)
BATCH_NORM = Network("with_batch_norm", with_batch_norm)


def batches(steps: int, samples: int, seed: int) -> list[Batch]:
    """``steps`` joint batches: features [samples, FEATURES] float32, labels [samples, 1] int64."""
    random = np.random.default_rng(seed)
    return [
        (
            random.standard_normal((samples, FEATURES)).astype("float32"),
            random.integers(0, CLASSES, (samples, 1)).astype("int64"),
        )
        for _ in range(steps)
    ]


def share(rank: int) -> slice:
    """A rank's part of the joint batch."""
    return slice(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)
