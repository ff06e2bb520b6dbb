"""Means over samples, and Paddle's own losses with their ways to leave samples out. Imports Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.nn import functional as F

from tests.joint_batch import case
from tests.joint_batch.builder import Builder

CLASSES = 5
CLASS_WEIGHTS = (0.2, 0.5, 1.0, 2.0, 3.0)


@case
def plain_mean(g: Builder) -> Any:
    """Batches of unlike sizes, nothing else."""
    return g.squares().mean()


@case
def mse_loss(g: Builder) -> Any:
    """Several numbers of each sample, by Paddle's function."""
    return F.mse_loss(g.features(3), g.floats(3))


@case
def smooth_l1(g: Builder) -> Any:
    """Two outputs, Paddle's mean."""
    return F.smooth_l1_loss(g.features(2), g.floats(2))


@case
def hinge(g: Builder) -> Any:
    """A margin, by hand."""
    return F.relu(1 - g.features(1) * (2 * g.positives().astype(g.dtype) - 1)).mean()


@case
def cross_entropy(g: Builder) -> Any:
    """The default: labels equal to -100 would be left out, and here is none."""
    return F.cross_entropy(g.features(CLASSES), g.labels(CLASSES))


@case(ends_empty=True)
def cross_entropy_default_ignored(g: Builder) -> Any:
    """Labels equal to -100, which the default leaves out; of none the mean is 0."""
    return F.cross_entropy(g.features(CLASSES), g.labels(CLASSES, ignore=-100))


@case(ends_empty=True)
def cross_entropy_ignore_index(g: Builder) -> Any:
    """Labels equal to -1 are left out."""
    return F.cross_entropy(g.features(CLASSES), g.labels(CLASSES, ignore=-1), ignore_index=-1)


@case
def cross_entropy_ignored_class(g: Builder) -> Any:
    """A class that exists is left out, as padding is."""
    return F.cross_entropy(g.features(CLASSES), g.labels(CLASSES), ignore_index=0)


@case
def cross_entropy_class_weights(g: Builder) -> Any:
    """The mean divides by the sum of the samples' class weights."""
    return F.cross_entropy(g.features(CLASSES), g.labels(CLASSES), weight=g.constant(CLASS_WEIGHTS))


@case
def cross_entropy_weights_and_ignore(g: Builder) -> Any:
    """Class weights, and labels that are left out."""
    label, weight = g.labels(CLASSES, ignore=-1), g.constant(CLASS_WEIGHTS)
    return F.cross_entropy(g.features(CLASSES), label, weight=weight, ignore_index=-1)


@case
def cross_entropy_soft_label(g: Builder) -> Any:
    """Smoothed labels."""
    smooth = F.label_smooth(F.one_hot(g.labels(CLASSES).flatten(), CLASSES).astype(g.dtype), epsilon=0.1)
    return F.cross_entropy(g.features(CLASSES), smooth, soft_label=True)


@case
def cross_entropy_soft_weighted(g: Builder) -> Any:
    """Smoothed labels and class weights: the mean divides by what the labels weigh."""
    smooth = F.label_smooth(F.one_hot(g.labels(CLASSES).flatten(), CLASSES).astype(g.dtype), epsilon=0.1)
    return F.cross_entropy(g.features(CLASSES), smooth, weight=g.constant(CLASS_WEIGHTS), soft_label=True)


@case
def cross_entropy_sum_over_count(g: Builder) -> Any:
    """Paddle's sum, divided by the labels that count."""
    label = g.labels(CLASSES, ignore=-100)
    summed = F.cross_entropy(g.features(CLASSES), label, reduction="sum")
    return summed / (label != -100).astype(g.dtype).sum()


@case
def softmax_with_cross_entropy(g: Builder) -> Any:
    """The function of older scripts: a plain mean, also over samples that are left out."""
    return F.softmax_with_cross_entropy(g.features(CLASSES), g.labels(CLASSES, ignore=-100)).mean()


@case
def nll_ignore_index(g: Builder) -> Any:
    """By hand: Paddle's fused mean and sum write behind an array where a label is left out."""
    label = g.labels(CLASSES, ignore=-100).flatten()
    each = F.nll_loss(F.log_softmax(g.features(CLASSES)), label, reduction="none")
    return each.sum() / (label != -100).astype(g.dtype).sum()


@case
def nll_weighted(g: Builder) -> Any:
    """A fused mean with its own sum of class weights."""
    weight = g.constant(CLASS_WEIGHTS)
    return F.nll_loss(F.log_softmax(g.features(CLASSES)), g.labels(CLASSES).flatten(), weight=weight)


@case
def nll_mean(g: Builder) -> Any:
    """The fused mean."""
    return F.nll_loss(F.log_softmax(g.features(CLASSES)), g.labels(CLASSES).flatten())


@case
def nll_sum_over_size(g: Builder) -> Any:
    """The fused sum over the size of the batch."""
    label = g.labels(CLASSES).flatten()
    summed = F.nll_loss(F.log_softmax(g.features(CLASSES)), label, reduction="sum")
    return summed / paddle.shape(label)[0].astype(g.dtype)


@case
def bce_with_logits(g: Builder) -> Any:
    """A weight of each sample and of positives; the mean is over all samples."""
    goal = g.positives().astype(g.dtype)
    return F.binary_cross_entropy_with_logits(g.features(1), goal, weight=g.weights(), pos_weight=g.constant([3.0]))


@case
def bce_over_weights(g: Builder) -> Any:
    """The weighted sum over the sum of weights."""
    goal, weight = g.positives().astype(g.dtype), g.weights()
    each = F.binary_cross_entropy(F.sigmoid(g.features(1)), goal, weight=weight, reduction="sum")
    return each / weight.sum()


@case(grows=True)
def kl_batchmean(g: Builder) -> Any:
    """``batchmean``; where the batch is unknown, Paddle divides by -1."""
    goal = F.softmax(g.floats(4))
    return F.kl_div(F.log_softmax(g.features(4)), goal, reduction="batchmean")


@case
def kl_by_hand(g: Builder) -> Any:
    """The sum over classes, the mean over samples."""
    goal = F.softmax(g.floats(4))
    return F.kl_div(F.log_softmax(g.features(4)), goal, reduction="none").sum(axis=-1).mean()


@case(grows=True)
def sum_over_batch(g: Builder) -> Any:
    """A sum: the joint gradient is as many times as large."""
    return 0.3 * g.squares().sum()


@case(grows=True)
def sum_and_l2(g: Builder) -> Any:
    """A sum over the batch, and a penalty that does not grow with it."""
    each = g.squares()
    decay = paddle.create_parameter([4, 3], g.dtype, default_initializer=paddle.nn.initializer.Constant(0.5))
    return 0.3 * each.sum() + 0.05 * (decay**2).sum()


@case
def mean_and_l2(g: Builder) -> Any:
    """A mean, and the parameters' squares."""
    loss = g.squares().mean()
    held = paddle.static.default_main_program().global_block().all_parameters()
    return loss + 0.01 * paddle.add_n([(one**2).sum() for one in held])


@case(grows=True, said={"merge": "no sum over samples"})
def sum_and_mean(g: Builder) -> Any:
    """A term that grows with the batch beside one that does not."""
    out = g.features(2)
    goal = g.floats(2)
    return 0.3 * ((out - goal) ** 2).sum() + F.smooth_l1_loss(out, goal)


@case(
    grows=True,
    without=("merge",),
    reason="whether the number of ranks stands for micro-batches as well is open",
    said={"default": "the number of shares"},
)
def times_worker_num(g: Builder) -> Any:
    """A sum over the batch that its author has multiplied by ``fleet.worker_num()``: once is enough."""
    return 0.3 * g.squares().sum() * g.ranks


@case(grows=True, said={"default": "the number of samples of a rank, 20"})
def fixed_batch_size(g: Builder) -> Any:
    """A sum over the batch by a number that may be a rank's batch size, or the joint batch's."""
    return g.squares().sum() / 20.0
