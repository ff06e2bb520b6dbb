"""Sums over what is valid, divided by how much is valid. Imports Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.nn import functional as F

from tests.joint_batch import case
from tests.joint_batch.batches import Batch
from tests.joint_batch.builder import Builder

_FED = "a count that is fed says nothing of micro-batches"


@case
def masked_mean(g: Builder) -> Any:
    """The sum of masked losses over the sum of the mask; NaN where one process has nothing."""
    mask = g.mask()
    return (g.squares() * mask).sum() / mask.sum()


@case(ends_empty=True, without=("merge",), reason="micro-batches without samples leave rows without NaN, too")
def masked_mean_to_the_end(g: Builder) -> Any:
    """The same, and in the last step nothing is valid anywhere: NaN, as one process has it."""
    mask = g.mask()
    return paddle.sum(g.squares() * mask) / paddle.sum(mask)


@case(ends_empty=True)
def masked_mean_epsilon(g: Builder) -> Any:
    """A small number keeps it from a division by zero."""
    mask = g.mask()
    return (g.squares() * mask).sum() / (mask.sum() + 1e-8)


@case(ends_empty=True)
def masked_mean_large_epsilon(g: Builder) -> Any:
    """A number that is not small beside the count."""
    mask = g.mask()
    return (g.squares() * mask).sum() / (mask.sum() + 1.0)


@case(ends_empty=True)
def masked_mean_clip(g: Builder) -> Any:
    """The count is at least 1."""
    mask = g.mask()
    return (g.squares() * mask).sum() / mask.sum().clip(min=1.0)


@case(ends_empty=True, said={"merge": "no sum over samples"})
def masked_mean_high_clip(g: Builder) -> Any:
    """The count is at least 8, which some ranks' own counts never reach."""
    mask = g.mask()
    return (g.squares() * mask).sum() / paddle.clip(mask.sum(), min=8.0)


@case(ends_empty=True)
def masked_mean_maximum(g: Builder) -> Any:
    """``paddle.maximum`` with a tensor of one."""
    mask = g.mask()
    return (g.squares() * mask).sum() / paddle.maximum(mask.sum(), paddle.ones([], g.dtype))


@case
def ratio_of_means(g: Builder) -> Any:
    """Both are means over the batch: their quotient is the quotient of sums."""
    mask = g.mask()
    return (g.squares() * mask).mean() / mask.mean()


@case
def integer_mask(g: Builder) -> Any:
    """The mask is a comparison of integers, and its sum an integer."""
    valid = g.labels(5, ignore=-1) >= 0
    return paddle.where(valid, g.squares(), paddle.zeros([1], g.dtype)).sum() / valid.sum().astype(g.dtype)


@case
def count_nonzero(g: Builder) -> Any:
    """The count by ``count_nonzero``."""
    mask = g.mask()
    return (g.squares() * mask).sum() / paddle.count_nonzero(mask).astype(g.dtype)


@case
def masked_select(g: Builder) -> Any:
    """The mean of what is selected."""
    return g.squares().masked_select(g.mask() > 0).mean()


@case
def gather_nonzero(g: Builder) -> Any:
    """The mean of samples that are picked by their numbers."""
    index = paddle.nonzero(g.mask().flatten() > 0)
    return paddle.gather(g.squares(), index.flatten()).mean()


@case
def gather_nd_of_logits(g: Builder) -> Any:
    """Logits and labels of valid samples, then the default cross entropy."""
    index = paddle.nonzero(g.mask().flatten() > 0)
    return F.cross_entropy(paddle.gather_nd(g.features(5), index), paddle.gather_nd(g.labels(5), index))


@case
def boolean_index(g: Builder) -> Any:
    """Python's brackets with a comparison."""
    return g.squares()[g.mask() > 0].mean()


@case
def index_select(g: Builder) -> Any:
    """``index_select`` with what ``where`` returns."""
    index = paddle.where(g.mask().flatten() > 0)[0].flatten()
    return paddle.index_select(g.squares(), index).mean()


@case(said={"merge": "no sum over samples"})
def two_masks(g: Builder) -> Any:
    """A mean of terms with masks of their own."""
    out = g.features(2)
    first, second = g.mask(), g.mask(name="other")
    left = ((out[:, :1] - g.floats(1)) ** 2 * first).sum() / first.sum()
    right = ((out[:, 1:] - g.floats(1, name="other_goal")).abs() * second).sum() / (second.sum() + 1e-6)
    return (left + 0.5 * right) / 2


@case
def weighted_mean(g: Builder) -> Any:
    """Weights that are fed, not 0 or 1."""
    weight = g.weights()
    return (g.squares() * weight).sum() / weight.sum()


@case
def normalized_weights(g: Builder) -> Any:
    """The weights are divided by their sum before they meet the losses."""
    weight = g.weights()
    return (g.squares() * (weight / weight.sum())).sum()


@case
def weights_with_mean_one(g: Builder) -> Any:
    """The weights are divided by their mean, and the loss is a mean."""
    weight = g.weights()
    return (g.squares() * weight / weight.mean()).mean()


@case
def size_from_shape(g: Builder) -> Any:
    """A sum over the size of the batch."""
    each = g.squares()
    return each.sum() / paddle.shape(each)[0].astype(g.dtype)


@case
def size_from_numel(g: Builder) -> Any:
    """A sum over the number of elements."""
    each = (g.features(3) - g.floats(3)) ** 2
    return each.sum() / paddle.numel(each).astype(g.dtype)


@case
def size_from_ones(g: Builder) -> Any:
    """The size of the batch as a sum of ones."""
    each = g.squares()
    return each.sum() / paddle.ones_like(each).sum()


@case(without=("merge",), reason=_FED)
def fed_joint_count(g: Builder) -> Any:
    """The careful author's form: the joint count over the number of ranks is fed."""
    mask = g.mask()

    def of(joint: Batch, _: Batch, ranks: int) -> Any:
        return joint["mask"].sum() / ranks

    return (g.squares() * mask).sum() / g.number("count", of)


@case(without=("merge",), reason=_FED)
def all_reduced_count(g: Builder) -> Any:
    """The joint count is fed, and the sum multiplied by the number of ranks."""
    mask = g.mask()
    count = g.number("count", lambda joint, *_: joint["mask"].sum())
    return (g.squares() * mask).sum() * g.ranks / count


@case(without=("merge",), reason=_FED)
def own_count_fed(g: Builder) -> Any:
    """Each rank feeds the count of its own samples, which it computed with numpy."""
    mask = g.mask()
    count = g.number("count", lambda _, own, __: max(own["mask"].sum(), 1e-12))
    return (g.squares() * mask).sum() / count


@case(static=True)
def static_masked_mean(g: Builder) -> Any:
    """The size of the batch is known when the program is built."""
    mask = g.mask()
    return (g.squares() * mask).sum() / mask.sum()


@case(static=True)
def static_ignore_index(g: Builder) -> Any:
    """A known size, and labels that are left out."""
    return F.cross_entropy(g.features(5), g.labels(5, ignore=-1), ignore_index=-1)


@case(static=True)
def static_kl_batchmean(g: Builder) -> Any:
    """``batchmean`` divides by the known size."""
    return F.kl_div(F.log_softmax(g.features(4)), F.softmax(g.floats(4)), reduction="batchmean")
