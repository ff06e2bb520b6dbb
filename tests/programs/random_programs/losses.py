"""The last part of a random program: from a vector to a loss that is a mean over the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.nn import functional as F

from tests.programs.random_programs.blocks import Builder, width


def squares(g: Builder, h: Any) -> Any:
    return F.mse_loss(g.linear(width(h), 3)(h), g.floats(3))


def cross_entropy(g: Builder, h: Any) -> Any:
    return F.cross_entropy(g.linear(width(h), 5)(h), g.classes(5))


def soft_labels(g: Builder, h: Any) -> Any:
    goal = F.label_smooth(F.one_hot(g.classes(5).flatten(), 5).astype(g.dtype), epsilon=0.1)
    return F.cross_entropy(g.linear(width(h), 5)(h), goal, soft_label=True)


def clicks(g: Builder, h: Any) -> Any:
    return F.binary_cross_entropy_with_logits(g.linear(width(h), 1)(h), g.classes(2).astype(g.dtype))


def huber(g: Builder, h: Any) -> Any:
    return F.smooth_l1_loss(g.linear(width(h), 2)(h), g.floats(2))


def absolute(g: Builder, h: Any) -> Any:
    return (g.linear(width(h), 2)(h) - g.floats(2)).abs().mean()


def hinge(g: Builder, h: Any) -> Any:
    return F.relu(1 - g.linear(width(h), 1)(h) * (2 * g.classes(2).astype(g.dtype) - 1)).mean()


def divergence(g: Builder, h: Any) -> Any:
    goal = F.softmax(g.floats(4), axis=1)
    return (goal * (paddle.log(goal) - F.log_softmax(g.linear(width(h), 4)(h), axis=1))).sum(axis=1).mean()


def pairs(g: Builder, h: Any) -> Any:
    better, worse = g.linear(width(h), 1)(h), g.linear(width(h), 1)(h)
    return F.softplus(worse - better).mean()


def sum_over_outputs(g: Builder, h: Any) -> Any:
    return 0.2 * ((g.linear(width(h), 3)(h) - g.floats(3)) ** 2).sum(axis=1).mean()


def divided_by_the_batch(g: Builder, h: Any) -> Any:
    return (g.linear(width(h), 2)(h) - g.floats(2)).square().sum() / paddle.shape(h)[0].astype(g.dtype)


def two_goals(g: Builder, h: Any) -> Any:
    return 0.7 * cross_entropy(g, h) + 0.3 * squares(g, paddle.tanh(h))


def with_penalty(g: Builder, h: Any) -> Any:
    layer = g.linear(width(h), 2)
    return F.mse_loss(layer(h), g.floats(2)) + 0.01 * layer.weight.square().sum()


LOSSES: dict[str, Callable[[Builder, Any], Any]] = {
    build.__name__: build
    for build in (
        squares,
        cross_entropy,
        soft_labels,
        clicks,
        huber,
        absolute,
        hinge,
        divergence,
        pairs,
        sum_over_outputs,
        divided_by_the_batch,
        two_goals,
        with_penalty,
    )
}
