"""Build the static programs: one that trains, one that evaluates, and the optimizer between them and fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train import fleet
from fleet_train.data import Dataset
from fleet_train.train.config import TrainConfig
from fleet_train.train.models import build_model
from fleet_train.train.schedules import Schedule


@dataclass(frozen=True)
class Programs:
    """What the loop runs, beside `fleet.main_program`: the facade may change that one between two steps."""

    startup: Any
    loss: Any
    scheduler: Any
    evaluation: Any
    evaluation_sums: dict[str, Any]
    """Of one batch: sum of the losses (float32), number of correct predictions (int64)."""
    features: Any
    probabilities: Any
    """Input and output of the evaluation program, for exporting."""


def build_programs(config: TrainConfig, data: Dataset, schedule: Schedule, world_size: int, strategy: Any) -> Programs:
    """The training program after fleet's conversion, and an evaluation program on the same parameters."""

    def logits_and_labels(training: bool) -> tuple[Any, Any, Any]:
        features = paddle.static.data("features", [-1, *data.sample_shape], "float32")
        labels = paddle.static.data("labels", [-1], "int64")
        model = build_model(config.model, data.sample_shape, data.num_classes)
        if not training:
            model.eval()
        return features, model(features), labels

    training, startup = paddle.static.Program(), paddle.static.Program()
    scheduler = paddle.optimizer.lr.LambdaDecay(config.peak_learning_rate(world_size), schedule)
    with paddle.static.program_guard(training, startup), paddle.utils.unique_name.guard():
        _, logits, labels = logits_and_labels(training=True)
        loss = paddle.nn.functional.cross_entropy(logits, labels)
        optimizer = fleet.distributed_optimizer(make_optimizer(config, scheduler), strategy=strategy)
        optimizer.minimize(loss, startup)

    # Program.clone(for_test=True) does not work in PIR. A second program under a fresh name guard has the same
    # parameter names and so reads the same tensors of the scope; its own startup program is never run.
    evaluation = paddle.static.Program()
    with paddle.static.program_guard(evaluation, paddle.static.Program()), paddle.utils.unique_name.guard():
        features, logits, labels = logits_and_labels(training=False)
        probabilities = paddle.nn.functional.softmax(logits)
        sums = {
            "loss": paddle.nn.functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": paddle.sum((paddle.argmax(logits, axis=-1) == labels).astype("int64")),
        }
    return Programs(startup, loss, scheduler, evaluation, sums, features, probabilities)


def make_optimizer(config: TrainConfig, learning_rate: Any) -> Any:
    """The named Paddle optimizer, not yet wrapped."""
    decay = config.weight_decay or None
    builders: dict[str, Callable[[], Any]] = {
        "sgd": lambda: paddle.optimizer.SGD(learning_rate, weight_decay=decay),
        "momentum": lambda: paddle.optimizer.Momentum(learning_rate, momentum=0.9, weight_decay=decay),
        "adam": lambda: paddle.optimizer.Adam(learning_rate, weight_decay=decay),
        "adamw": lambda: paddle.optimizer.AdamW(learning_rate, weight_decay=config.weight_decay),
    }
    return builders[config.optimizer]()
