"""Counts of classes and of positives that weigh the samples. Imports Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.nn import functional as F

from tests.joint_batch import case
from tests.joint_batch.builder import Builder

_TWO = {"merge": "no sum over samples"}


@case
def focal(g: Builder) -> Any:
    """Paddle's focal loss, by the number of positives."""
    goal = g.positives().astype(g.dtype)
    count = paddle.clip(goal.sum(), min=1.0)
    return F.sigmoid_focal_loss(g.features(1), goal, normalizer=count.reshape([1]), reduction="sum")


@case
def focal_by_hand(g: Builder) -> Any:
    """(1 - p)^2 log p over the positives."""
    goal, guess = g.positives().astype(g.dtype), F.sigmoid(g.features(1))
    right = guess * goal + (1 - guess) * (1 - goal)
    return (-((1 - right) ** 2) * paddle.log(right + 1e-7)).sum() / (goal.sum() + 1)


@case(said=_TWO)
def class_balance(g: Builder) -> Any:
    """Positives weigh as many negatives as there are, over the mean of weights."""
    goal = g.positives().astype(g.dtype)
    positive, negative = goal.sum(), (1 - goal).sum()
    weight = goal * negative / (positive + negative) + (1 - goal) * positive / (positive + negative)
    return F.binary_cross_entropy_with_logits(g.features(1), goal, weight=weight)


@case(said=_TWO)
def balanced_pos_weight(g: Builder) -> Any:
    """The ratio of negatives to positives as the weight of positives."""
    goal = g.positives().astype(g.dtype)
    ratio = (1 - goal).sum() / (goal.sum() + 1.0)
    each = F.binary_cross_entropy_with_logits(g.features(1), goal, reduction="none")
    return (each * (1 + (ratio - 1) * goal)).mean()


@case(said=_TWO)
def per_class_mean(g: Builder) -> Any:
    """The mean of each class's mean loss."""
    label = g.labels(4)
    each = F.cross_entropy(g.features(4), label, reduction="none").reshape([-1, 1])
    member = F.one_hot(label.flatten(), 4).astype(g.dtype)
    return (paddle.matmul(member, each, transpose_x=True).flatten() / (member.sum(axis=0) + 1e-6)).mean()


@case(said=_TWO)
def weights_from_frequencies(g: Builder) -> Any:
    """Classes weigh the inverse of their share of the batch."""
    label = g.labels(4)
    member = F.one_hot(label.flatten(), 4).astype(g.dtype)
    share = member.mean(axis=0) + 0.05
    each = F.cross_entropy(g.features(4), label, reduction="none").flatten()
    return (each * (member / share).sum(axis=1)).mean()


@case(said=_TWO)
def positives_and_negatives(g: Builder) -> Any:
    """The means over positives and over negatives, added."""
    goal = g.positives().astype(g.dtype)
    each = F.binary_cross_entropy_with_logits(g.features(1), goal, reduction="none")
    return (each * goal).sum() / (goal.sum() + 1e-6) + (each * (1 - goal)).sum() / ((1 - goal).sum() + 1e-6)


@case(said=_TWO)
def reduced_positives(g: Builder) -> Any:
    """Boxes by the number of positives, classes by the number of samples."""
    out, goal = g.features(3), g.positives().astype(g.dtype)
    boxes = (F.smooth_l1_loss(out[:, 1:], g.floats(2), reduction="none") * goal).sum() / (2 * goal.sum() + 1e-5)
    return boxes + F.binary_cross_entropy_with_logits(out[:, :1], goal)
