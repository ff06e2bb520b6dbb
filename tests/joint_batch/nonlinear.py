"""What a loss takes over the whole batch, depends on parameters, and is not used linearly. Imports Paddle."""

from __future__ import annotations

from functools import partial
from typing import Any

import paddle
from paddle.nn import functional as F

from tests.joint_batch import case
from tests.joint_batch.builder import Builder

_MERGE = {"merge": "no sum over samples"}
exposed = partial(case, said=_MERGE)


@exposed()
def root_of_mean(g: Builder) -> Any:
    """The root of a mean square."""
    return paddle.sqrt(g.squares().mean())


@exposed()
def log_of_mean(g: Builder) -> Any:
    """The logarithm of a mean."""
    return paddle.log(1.0 + g.squares().mean())


@exposed()
def masked_root(g: Builder) -> Any:
    """The root of a masked mean."""
    mask = g.mask()
    return paddle.sqrt((g.squares() * mask).sum() / mask.sum())


@exposed()
def standard_deviation(g: Builder) -> Any:
    """``std`` of the outputs beside their mean error; a rank with one sample has none of its own."""
    out = g.features(1)
    return (out.std() - 1.0) ** 2 + 0.1 * (out.mean() - 0.5) ** 2


@exposed()
def variance(g: Builder) -> Any:
    """``var`` of each output over the batch, as losses against collapse have it."""
    out = g.features(3)
    return F.relu(2.0 - out.var(axis=0)).mean()


@exposed()
def variance_by_hand(g: Builder) -> Any:
    """The samples' distance from their mean, which depends on all samples."""
    out = g.features(3)
    middle = out.mean(axis=0, keepdim=True)
    return ((out - middle) ** 2).mean()


@exposed()
def soft_dice(g: Builder) -> Any:
    """The overlap of the whole batch."""
    guess, goal = F.sigmoid(g.features(4)), g.mask(4, name="region")
    return 1 - (2 * (guess * goal).sum() + 1) / (guess.sum() + goal.sum() + 1)


@exposed()
def intersection_over_union(g: Builder) -> Any:
    """(2I + 1) / (U + 1), per class over the batch."""
    guess, goal = F.softmax(g.features(4)), F.one_hot(g.labels(4).flatten(), 4).astype(g.dtype)
    common = (guess * goal).sum(axis=0)
    union = (guess + goal).sum(axis=0) - common
    return (1 - (2 * common + 1) / (union + 1)).mean()


@exposed()
def tversky(g: Builder) -> Any:
    """False positives and negatives weigh otherwise."""
    guess, goal = F.sigmoid(g.features(4)), g.mask(4, name="region")
    hit, false, missed = (guess * goal).sum(), (guess * (1 - goal)).sum(), ((1 - guess) * goal).sum()
    return (1 - (hit + 1e-6) / (hit + 0.3 * false + 0.7 * missed + 1e-6)) ** 0.75


@exposed()
def learned_weights(g: Builder) -> Any:
    """The weights of samples are an output of the network."""
    out = g.features(2)
    weight = F.sigmoid(out[:, 1:])
    return (weight * (out[:, :1] - g.floats(1)) ** 2).sum() / weight.sum()


@exposed()
def perplexity(g: Builder) -> Any:
    """The exponential of a masked mean."""
    label = g.labels(5, ignore=-1)
    each = F.cross_entropy(g.features(5), label, ignore_index=-1, reduction="none")
    valid = (label != -1).astype(g.dtype)
    return paddle.exp((each * valid).sum() / valid.sum())


@exposed()
def r2_score(g: Builder) -> Any:
    """One less what is explained of the goals' variance, which no parameter reaches."""
    goal = g.floats(1)
    total = ((goal - goal.mean()) ** 2).sum()
    return g.squares().sum() / total


@exposed()
def correlation(g: Builder) -> Any:
    """One less Pearson's correlation over the batch."""
    out, goal = g.features(1), g.floats(1)
    out, goal = out - out.mean(), goal - goal.mean()
    return 1 - (out * goal).sum() / (paddle.sqrt((out**2).sum() * (goal**2).sum()) + 1e-8)


@case(said={"default": "samples meet each other"})
def norm_of_all(g: Builder) -> Any:
    """The norm of the whole error; it grows as the root of the batch does."""
    return 0.1 * paddle.linalg.norm(g.features(2) - g.floats(2))


@exposed()
def product_of_means(g: Builder) -> Any:
    """Two means, multiplied."""
    out = g.features(2)
    return (out[:, 0] ** 2).mean() * ((out[:, 1] - g.floats(1).squeeze(1)) ** 2).mean()


@exposed()
def normalized_by_hand(g: Builder) -> Any:
    """A batch norm written with means: its numbers flow back into each sample."""
    out = g.features(3)
    middle = out.mean(axis=0)
    spread = ((out - middle) ** 2).mean(axis=0)
    normal = (out - middle) / paddle.sqrt(spread + 1e-3)
    return ((normal - g.floats(3)) ** 2).mean()


@exposed()
def uncertainty_of_the_mean(g: Builder) -> Any:
    """A learned scale divides a mean, which needs nothing; its square root needs the joint one."""
    scale = paddle.create_parameter([1], g.dtype, default_initializer=paddle.nn.initializer.Constant(0.3))
    return (paddle.exp(-scale) * paddle.sqrt(g.squares().mean()) + scale).sum()
