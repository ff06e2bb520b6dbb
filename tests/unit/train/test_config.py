"""What the trainer accepts, and the words it refuses with."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_train.errors import FleetTrainError
from fleet_train.train.config import TrainConfig


def test_default_rate_is_the_optimizers() -> None:
    assert TrainConfig(optimizer="adam").peak_learning_rate(4) == 0.002


def test_linear_scaling_multiplies_by_the_ranks() -> None:
    assert TrainConfig(learning_rate=0.1, scale_lr=True).peak_learning_rate(4) == pytest.approx(0.4)
    assert TrainConfig(learning_rate=0.1).peak_learning_rate(4) == 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "resnet18"}, "--model 'resnet18' is unknown; use one of mlp, cnn, ResNet18, "),
        ({"optimizer": "lion"}, "use one of sgd, momentum, adam, adamw"),
        ({"lr_schedule": "magic"}, "use one of constant, cosine, linear, polynomial, step"),
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
        ({"batch_size": -1}, "--batch_size -1: must be at least 1"),
        ({"checkpoint_every": -1}, "--checkpoint_every -1: must be at least 0"),
        ({"learning_rate": 0.0}, "--lr 0.0"),
        ({"learning_rate": float("nan")}, "--lr nan"),
        ({"weight_decay": float("nan")}, "--weight_decay nan"),
        ({"clip_norm": -1.0}, "--clip_norm -1.0: must be at least 0"),
        ({"label_smoothing": 1.0}, "--label_smoothing 1.0: must be at least 0 and below 1"),
        ({"ema_decay": float("nan")}, "--ema_decay nan"),
        ({"on_nan": "ignore"}, "--on_nan 'ignore' is unknown; use one of stop, skip"),
        ({"lr_milestones": (30.0,)}, "--lr_milestones belong to --lr_schedule step, not to cosine"),
        ({"lr_schedule": "step", "lr_milestones": (60.0, 30.0)}, "they must rise"),
        ({"lr_schedule": "step", "lr_decay": 1.5}, "--lr_decay 1.5: must be above 0 and below 1"),
        ({"checkpoint_every_steps": -1}, "--checkpoint_every_steps -1"),
        ({"resume": True, "overwrite": True}, "give only one of them"),
    ],
)
def test_senseless_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetTrainError, match=message):
        TrainConfig(**fields)
