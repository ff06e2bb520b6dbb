"""The built-in networks, as paddle.nn layers used in static mode.

Neither has batch norm: without synchronised statistics every rank would keep its own running mean, and an evaluation
that is shared out over ranks would mix them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from paddle import nn

from fleet_train.errors import DataError

Shape = tuple[int, ...]


def mlp(sample_shape: Shape, num_classes: int) -> Any:
    """Two hidden ReLU layers: [batch, *sample_shape] -> logits [batch, num_classes]."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(int(np.prod(sample_shape)), 128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def cnn(sample_shape: Shape, num_classes: int) -> Any:
    """Two convolutions and two dense layers for small images: [batch, channels, height, width] -> logits."""
    if len(sample_shape) != 3 or min(sample_shape[1:]) < 2:
        raise DataError(
            f"--model cnn needs images [channels, height, width] from 2 x 2 on, this data has {list(sample_shape)}; "
            "use --model mlp"
        )
    channels, height, width = sample_shape
    return nn.Sequential(
        nn.Conv2D(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2D(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * (height // 2) * (width // 2), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


_BUILDERS: dict[str, Callable[[Shape, int], Any]] = {"mlp": mlp, "cnn": cnn}


def build_model(name: str, sample_shape: Shape, num_classes: int) -> Any:
    """A new network; building it twice under unique_name.guard gives the same parameter names."""
    return _BUILDERS[name](sample_shape, num_classes)
