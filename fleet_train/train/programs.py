"""Builds the static programs, one for training and one for evaluation, and wraps the optimizer with fleet.

Their network has a name: two small ones of our own, and those of paddle.vision.models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleet_train import fleet
from fleet_train.data import Dataset
from fleet_train.errors import DataError, FleetTrainError
from fleet_train.train.config import TrainConfig
from fleet_train.train.numerics import SkipNotFinite, WeightAverage, refuse_to_skip_with, refuse_unlike_batches
from fleet_train.train.settings import VISION_MODELS, Schedule

_MOST_CLASSES_TO_CONFUSE = 100
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Programs:
    """The values that the loop uses, except `fleet.main_program`, which the facade may change between two steps."""

    startup: Any
    loss: Any
    scheduler: Any
    evaluation: Any
    evaluation_sums: dict[str, Any]
    """The sums over one batch: of the losses (float32), of correct predictions (int64) and of those in the top 5."""
    confusion: Any
    """The counts of one batch [classes, classes], row = true class; None if there are too many classes to display."""
    average: WeightAverage | None
    skipping: SkipNotFinite | None
    gradient_norm: Any
    """The norm of one update's gradient, float32 [1]; None if it is not recorded."""
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
    # `schedule` counts batches, the scheduler steps, which take several with gradient merge.
    scheduler = paddle.optimizer.lr.LambdaDecay(
        config.peak_learning_rate(world_size),
        lambda step: schedule.of_updates(fleet.profile().accumulate_steps)(step),
    )
    with paddle.static.program_guard(training, startup), paddle.utils.unique_name.guard():
        _, logits, labels = logits_and_labels(training=True)
        loss = paddle.nn.functional.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
        optimizer = fleet.distributed_optimizer(make_optimizer(config, scheduler, training), strategy=strategy)
        scheduler.step(0)  # the first rate once more: `strategy` may be another profile than fleet had before
        average, skipping = _around_update(config, optimizer)
        if world_size > 1:
            refuse_unlike_batches(config.last_batch, fleet.profile())
        optimizer.minimize(loss, startup)
    norm = optimizer.gradient_norm() if _records_norm(config, world_size) else None

    # Program.clone(for_test=True) does not work in PIR. A second program under a fresh name guard has the same
    # parameter names and so reads the same tensors of the scope; its own startup program is never run.
    evaluation = paddle.static.Program()
    with paddle.static.program_guard(evaluation, paddle.static.Program()), paddle.utils.unique_name.guard():
        features, logits, labels = logits_and_labels(training=False)
        probabilities = paddle.nn.functional.softmax(logits)
        sums, confusion = _evaluation_sums(logits, labels), _confusion(logits, labels)
    return Programs(
        startup, loss, scheduler, evaluation, sums, confusion, average, skipping, norm, features, probabilities
    )


def make_optimizer(config: TrainConfig, learning_rate: Any, program: Any) -> Any:
    """The named Paddle optimizer for `program`, which has its forward part; not yet wrapped by fleet.

    Clipping acts on the averaged gradients, before the weight decay is added to them, as everywhere in Paddle.
    """
    spared = _exempt_norms_and_biases(program) if config.no_decay_norm_bias else frozenset[str]()
    common = {
        "weight_decay": config.weight_decay or None,
        "grad_clip": paddle.nn.ClipGradByGlobalNorm(config.clip_norm) if config.clip_norm else None,
    }
    decoupled = {
        **common,
        "weight_decay": config.weight_decay,
        "apply_decay_param_fun": lambda name: name not in spared,
    }
    builders: dict[str, Callable[[], Any]] = {
        "sgd": lambda: paddle.optimizer.SGD(learning_rate, **common),
        "momentum": lambda: paddle.optimizer.Momentum(learning_rate, momentum=0.9, **common),
        "adam": lambda: paddle.optimizer.Adam(learning_rate, **common),
        "adamw": lambda: paddle.optimizer.AdamW(learning_rate, **decoupled),
    }
    return builders[config.optimizer]()


def _exempt_norms_and_biases(program: Any) -> frozenset[str]:
    """Give parameters with at most one dimension a decay of zero, which overrides the optimizer's; returns their
    names."""
    small = [each for each in program.global_block().all_parameters() if len(each.shape) <= 1]
    for parameter in small:
        parameter.regularizer = paddle.regularizer.L2Decay(0.0)
    return frozenset(parameter.name for parameter in small)


def _records_norm(config: TrainConfig, world_size: int) -> bool:
    """Clipping has computed it, except in LocalSGD's local steps, where each rank clips its own gradient."""
    is_clipped = config.clip_norm > 0 and not (fleet.profile().use_local_sgd and world_size > 1)
    return config.gradient_norm or is_clipped


def _around_update(config: TrainConfig, optimizer: Any) -> tuple[WeightAverage | None, SkipNotFinite | None]:
    average = WeightAverage(config.ema_decay) if config.ema_decay else None
    if average is not None:
        optimizer.around_update(average.follow)
    if config.on_nan == "stop" and fleet.profile().nonfinite != "skip":
        return average, None
    refuse_to_skip_with(fleet.profile())
    skipping = SkipNotFinite()
    optimizer.around_update(skipping.guard)  # last, so that nothing else sees such gradients
    return average, skipping


def _evaluation_sums(logits: Any, labels: Any) -> dict[str, Any]:
    sums = {
        "loss": paddle.nn.functional.cross_entropy(logits, labels, reduction="sum"),
        "accuracy": paddle.sum((paddle.argmax(logits, axis=-1) == labels).astype("int64")),
    }
    if logits.shape[-1] > 5:  # with fewer classes every prediction is among the first five
        _, best = paddle.topk(logits, 5, axis=-1)
        sums["top5_accuracy"] = paddle.sum((best == labels.unsqueeze(-1)).astype("int64"))
    return sums


def _confusion(logits: Any, labels: Any) -> Any:
    classes = logits.shape[-1]
    if classes > _MOST_CLASSES_TO_CONFUSE:
        return None
    one_hot = paddle.nn.functional.one_hot
    # float32 counts exactly up to 2**24, far above any batch.
    return paddle.matmul(one_hot(labels, classes), one_hot(paddle.argmax(logits, axis=-1), classes), transpose_x=True)


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
