"""Further losses, as users write them. Imports Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.nn import functional as F

from tests.joint_batch import case
from tests.joint_batch.batches import Samples
from tests.joint_batch.builder import Builder

_MERGE = {"merge": "no sum over samples"}


@case
def nested_means(g: Builder) -> Any:
    """Over outputs, then over samples."""
    return ((g.features(3) - g.floats(3)) ** 2).mean(axis=1).mean(axis=0)


@case
def several_means(g: Builder) -> Any:
    """Of one batch, with other widths: one count."""
    out = g.features(4)
    return F.mse_loss(out[:, :1], g.floats(1)) + 0.3 * F.l1_loss(out[:, 1:], g.floats(3, name="other"))


@case
def mean_and_last_axis(g: Builder) -> Any:
    """A reduction over axes of which one is the batch."""
    return ((g.features(6).reshape([-1, 2, 3]) - g.floats(2, 3)) ** 2).mean(axis=[0, 2]).sum()


@case
def time_major(g: Builder) -> Any:
    """[time, batch] by a transposition in the program."""
    token = g.tokens(9, 6)
    steps = paddle.nn.Embedding(9, 4)(token).transpose([1, 0, 2])
    hidden, _ = paddle.nn.GRU(4, 4, time_major=True)(steps)
    goal = g.labels(3, 6).transpose([1, 0])
    each = F.cross_entropy(paddle.nn.Linear(4, 3)(hidden), goal.unsqueeze(-1), reduction="none").squeeze(-1)
    mask = g.mask(6).transpose([1, 0])
    return (each * mask).sum() / mask.sum()


@case(said=_MERGE)
def masked_mean_times_ratio(g: Builder) -> Any:
    """The mean of a masked product, times all elements over valid ones."""
    mask = g.mask()
    return paddle.mean(g.squares() * mask) * (paddle.numel(mask).astype(g.dtype) / mask.sum())


@case
def reciprocal_of_count(g: Builder) -> Any:
    """Times one over the count."""
    mask = g.mask()
    return (g.squares() * mask).sum() * (1.0 / mask.sum())


@case
def triplet(g: Builder) -> Any:
    """Distances to a positive and a negative that are fed."""
    anchor = g.features(3)
    return F.triplet_margin_loss(anchor, g.floats(3, name="near"), g.floats(3, name="far"))


@case
def cosine(g: Builder) -> Any:
    """Paddle's cosine embedding loss."""
    label = g.data("same", (), "int64", _signs)
    return F.cosine_embedding_loss(g.features(3), g.floats(3), label)


def _signs(samples: Samples) -> Any:
    return 2 * samples.valid() - 1


@case
def quantile(g: Builder) -> Any:
    """A pinball loss."""
    error = g.floats(1) - g.features(1)
    return paddle.maximum(0.9 * error, -0.1 * error).mean()


@case
def huber_of_valid(g: Builder) -> Any:
    """``where`` instead of a product, and the count by ``numel`` of what is selected."""
    mask = g.mask() > 0
    each = F.smooth_l1_loss(g.features(1), g.floats(1), reduction="none")
    summed = paddle.where(mask, each, paddle.zeros_like(each)).sum()
    return summed / paddle.numel(paddle.masked_select(each, mask)).astype(g.dtype)


@case
def mixup(g: Builder) -> Any:
    """Two labels by fed weights of each sample."""
    out, first, second = g.features(4), g.labels(4), g.labels(4, name="second")
    part = g.data("part", (1,), g.dtype, lambda samples: samples.random.random((samples.number, 1)))
    one = F.cross_entropy(out, first, reduction="none").reshape([-1, 1])
    return (part * one + (1 - part) * F.cross_entropy(out, second, reduction="none").reshape([-1, 1])).mean()


@case
def label_smoothing_masked(g: Builder) -> Any:
    """Smoothed by hand, padding left out."""
    label = g.labels(4, ignore=-1)
    mask = (label >= 0).astype(g.dtype)
    log = F.log_softmax(g.features(4))
    hard = -paddle.take_along_axis(log, paddle.clip(label, min=0), axis=1)
    return ((0.9 * hard - 0.1 * log.mean(axis=1, keepdim=True)) * mask).sum() / mask.sum()


@case(said=_MERGE)
def uncertainty_weighting(g: Builder) -> Any:
    """Tasks with learned scales: a mean and a masked mean."""
    out, mask = g.features(2), g.mask()
    held = paddle.create_parameter([2], g.dtype, default_initializer=paddle.nn.initializer.Constant(0.2))
    first = ((out[:, :1] - g.floats(1)) ** 2).mean()
    second = ((out[:, 1:] - g.floats(1, name="other")).abs() * mask).sum() / mask.sum()
    return paddle.exp(-held[0]) * first + paddle.exp(-held[1]) * second + held.sum()


@case
def uncertainty_of_two_means(g: Builder) -> Any:
    """Learned scales of two means over the batch."""
    out = g.features(2)
    held = paddle.create_parameter([2], g.dtype, default_initializer=paddle.nn.initializer.Constant(0.2))
    first, second = ((out[:, :1] - g.floats(1)) ** 2).mean(), (out[:, 1:] - g.floats(1, name="other")).abs().mean()
    return paddle.exp(-held[0]) * first + paddle.exp(-held[1]) * second + held.sum()


@case
def dice_per_sample(g: Builder) -> Any:
    """The overlap of each sample, the mean over samples: nothing is taken over the batch."""
    guess, goal = F.sigmoid(g.features(4)), g.mask(4, name="region")
    common = (guess * goal).sum(axis=1)
    return (1 - (2 * common + 1) / (guess.sum(axis=1) + goal.sum(axis=1) + 1)).mean()


@case
def square_error_cost(g: Builder) -> Any:
    """The function of the oldest scripts."""
    return paddle.mean(F.square_error_cost(g.features(2), g.floats(2)))


@case
def mean_of_rows(g: Builder) -> Any:
    """Rows are stacked from two heads before the mean."""
    out = g.features(2)
    return paddle.concat([(out[:, :1] - g.floats(1)) ** 2, out[:, 1:] ** 2], axis=0).mean()


@case
def detached_target(g: Builder) -> Any:
    """A target that the network itself computes, without a gradient; confident samples count."""
    out = F.softmax(g.features(3))
    sure = (out.detach().max(axis=1, keepdim=True) > 0.4).astype(g.dtype)
    return ((out - g.floats(3)) ** 2 * sure).sum() / (sure.sum() + 1e-6)


@case
def mean_by_einsum(g: Builder) -> Any:
    """A weighted sum by ``einsum`` over the weights' sum."""
    weight = g.weights()
    return paddle.einsum("bi,bi->", g.squares(), weight) / weight.sum()


@case
def mean_by_matmul(g: Builder) -> Any:
    """A weighted sum as a product of matrices."""
    weight = g.weights()
    return paddle.matmul(weight, g.squares(), transpose_x=True).sum() / weight.sum()


@case
def poisson(g: Builder) -> Any:
    """Counts are explained; by Paddle's function."""
    return F.poisson_nll_loss(0.3 * g.features(1), g.positives().astype(g.dtype))


@case
def multi_label(g: Builder) -> Any:
    """Soft margins of several labels."""
    return F.multi_label_soft_margin_loss(g.features(3), g.positives(3).astype(g.dtype))


@case
def gaussian(g: Builder) -> Any:
    """A normal distribution's likelihood."""
    out = g.features(2)
    return F.gaussian_nll_loss(out[:, :1], g.floats(1), F.softplus(out[:, 1:]) + 0.1)


@case(said={"default": "samples meet each other"})
def hardest(g: Builder) -> Any:
    """The batch's worst sample: they meet."""
    worst, _ = paddle.topk(g.squares().flatten(), 1)
    return worst.mean()


@case(said={"default": "by their places"}, without=("merge",), reason="a sample alone has no others")
def all_but_the_first(g: Builder) -> Any:
    """Samples by their places in the batch."""
    return g.squares()[1:].mean()


@case
def unequal_parts_joined(g: Builder) -> Any:
    """The valid samples, and all of them, in one mean."""
    each, mask = g.squares(), g.mask()
    return paddle.concat([each.masked_select(mask > 0), each.flatten()]).mean()


@case
def unbound(g: Builder) -> Any:
    """Columns one by one."""
    first, second, third = paddle.unbind(g.features(3), axis=1)
    left, _ = paddle.split(g.floats(4), [1, 3], axis=1)
    return ((first - left.flatten()) ** 2 + (second * third) ** 2).mean()


@case(said=_MERGE)
def mean_squared_mean(g: Builder) -> Any:
    """The square of a mean error, a bias."""
    return (g.features(1) - g.floats(1)).mean() ** 2


@case
def static_axis_names(g: Builder) -> Any:
    """Negative axes and kept dimensions."""
    each = (g.features(6).reshape([-1, 2, 3]) - g.floats(2, 3)) ** 2
    return each.sum(axis=-1, keepdim=True).mean(axis=(-3, -2)).sum()


@case(said=_MERGE)
def cond_on_numbers(g: Builder) -> Any:
    """A guard whose blocks read numbers of the batch."""
    mask = g.mask()
    total, count = (g.squares() * mask).sum(), mask.sum()
    is_safe = paddle.logical_and(count > 0, total >= 0)
    return paddle.static.nn.cond(is_safe, lambda: total / count, lambda: 0 * total)


@case(said=_MERGE)
def cases_of_numbers(g: Builder) -> Any:
    """Three ways to divide, by how many are valid; one of them reads a mean that depends on parameters."""
    each, mask = g.squares(), g.mask()
    total, count, mean = (each * mask).sum(), mask.sum(), each.mean()
    ways = [(count > 20, lambda: total / count), (mean > 0.5, lambda: total / (count + 1) + mean**2)]
    return paddle.static.nn.case(ways, default=lambda: mean + 0 * total)


@case(said={"default": "take sums and counts in front of it"})
def cond_with_sums_inside(g: Builder) -> Any:
    """A guard that sums in its blocks: a rank without valid samples contributes 0, as its script says."""
    each, mask = g.squares(), g.mask()
    return paddle.static.nn.cond(mask.sum() > 0, lambda: (each * mask).sum() / mask.sum(), lambda: (each * 0).sum())


@case(said={"default": "samples meet each other"})
def weights_from_bincount(g: Builder) -> Any:
    """Classes weigh the inverse of how often they are in the batch."""
    label = g.labels(4)
    counts = paddle.bincount(label.flatten(), minlength=4).astype(g.dtype)
    each = F.cross_entropy(g.features(4), label, reduction="none")
    weight = paddle.gather(1 / (counts + 1), label.flatten()).unsqueeze(-1)
    return (each * weight).sum() / weight.sum()
