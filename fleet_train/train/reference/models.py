"""Networks by name, as paddle.nn layers in static mode: two small ones, and those of paddle.vision.models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleet_train.errors import DataError, FleetTrainError
from fleet_train.train.reference.model_names import VISION_MODELS

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


def vision_model(name: str, sample_shape: Shape, num_classes: int) -> Any:
    """A network of paddle.vision.models: [batch, 3, height, width] -> logits [batch, num_classes]."""
    if len(sample_shape) != 3 or sample_shape[0] != 3:
        raise DataError(
            f"--model {name} needs colour images [3, height, width], this data has {list(sample_shape)}; use "
            "--data_dir with images, or --model mlp or cnn"
        )
    builder = getattr(paddle.vision.models, VISION_MODELS[name], None)
    if builder is None:
        raise FleetTrainError(
            f"--model {name}: Paddle {paddle.__version__} has no paddle.vision.models.{VISION_MODELS[name]}; use "
            "another --model"
        )
    return builder(num_classes=num_classes)


_SMALL: dict[str, Callable[[Shape, int], Any]] = {"mlp": mlp, "cnn": cnn}


def build_model(name: str, sample_shape: Shape, num_classes: int) -> Any:
    """A new network; building it twice under unique_name.guard gives the same parameter names."""
    if name in _SMALL:
        return _SMALL[name](sample_shape, num_classes)
    return vision_model(name, sample_shape, num_classes)
