"""The optimizer of the reference trainer, with its weight decay and clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from fleet_train.train.reference.config import TrainConfig


def make_optimizer(config: TrainConfig, learning_rate: Any, program: Any) -> Any:
    """The named Paddle optimizer for `program`, which has its forward part; not yet wrapped by fleet.

    Clipping acts on the averaged gradients, before the weight decay is added to them, as everywhere in Paddle.
    """
    spared = _spare_norms_and_biases(program) if config.no_decay_norm_bias else frozenset[str]()
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


def _spare_norms_and_biases(program: Any) -> frozenset[str]:
    """Give parameters with at most one dimension a decay of zero, which overrides the optimizer's; returns their
    names."""
    small = [each for each in program.global_block().all_parameters() if len(each.shape) <= 1]
    for parameter in small:
        parameter.regularizer = paddle.regularizer.L2Decay(0.0)
    return frozenset(parameter.name for parameter in small)
