"""Losses of every kind that a program may have, by what of them is a sum over the batch."""

# ruff: noqa: ARG005  # a loss may need only one of the three

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

Loss = Callable[[Any, Any, Any], Any]


def count(x: Any) -> Any:
    return paddle.shape(x)[0].cast("float32")


def l2(*values: Any) -> Any:
    return paddle.add_n([paddle.sum(paddle.square(value)) for value in values])


def cross_net(x: Any, weight: Any) -> Any:
    """As PaddleRec's dcn: sums of what depends on the samples, joined and summed once more."""
    terms = [paddle.sum(paddle.square(paddle.multiply(x, weight[0]))).reshape([1]) for _ in range(2)]
    return paddle.sum(paddle.concat(terms, axis=-1))


def hit_loss(x: Any, samples: int) -> Any:
    """As PaddleRec's dssm."""
    hit = paddle.slice(F.softmax(x, axis=1), axes=[0, 1], starts=[0, 0], ends=[samples, 1])
    return paddle.mean(-paddle.sum(paddle.log(hit)))


# x [batch, 4] is a layer's result, y [batch, 1] classes, weight [4, 4] a parameter.
SUMS: dict[str, Loss] = {
    "mean over classes, sum over samples": lambda x, y, weight: x.mean(axis=1).sum(),
    "sum over samples, mean over classes": lambda x, y, weight: x.sum(axis=0).mean(),
    "reduction": lambda x, y, weight: F.cross_entropy(x, y, reduction="sum"),
    "nll_loss": lambda x, y, weight: F.nll_loss(F.log_softmax(x), y.reshape([-1]), reduction="sum"),
    "one term of two": lambda x, y, weight: F.cross_entropy(x, y) + 0.5 * x.square().sum(),
    "negative, kept dimensions": lambda x, y, weight: -paddle.log(F.sigmoid(x)).sum(axis=[0, 1], keepdim=True),
    "beside an unknown term": lambda x, y, weight: x.sum() + paddle.logsumexp(x),
    "beside a term by a fed count": lambda x, y, weight: x.sum() + F.square_error_cost(x, x).sum() / fed([1]),
    "reshaped": lambda x, y, weight: x.reshape([-1]).sum(),
    "two unknown dimensions": lambda x, y, weight: sequence(x).sum(),
    "squared norm": lambda x, y, weight: paddle._C_ops.squared_l2_norm(x).sum(),
    "gram matrix": lambda x, y, weight: paddle.matmul(x, x, transpose_x=True).mean(),
    "dcn": lambda x, y, weight: F.cross_entropy(x, y) + cross_net(x, weight),
    "dssm": lambda x, y, weight: hit_loss(x, 8),
    "a decay counted per sample": lambda x, y, weight: (F.cross_entropy(x, y, reduction="none") + l2(weight)).sum(),
    "split": lambda x, y, weight: paddle.add_n([part.sum() for part in paddle.split(x, 2, axis=1)]),
    "combined": lambda x, y, weight: paddle.stack([x.sum(), x.mean()]).mean(),
}
OTHERS: dict[str, Loss] = {
    "cross entropy": lambda x, y, weight: F.cross_entropy(x, y),
    "nll_loss, mean": lambda x, y, weight: F.nll_loss(F.log_softmax(x), y.reshape([-1])),
    "sum over classes, mean over samples": lambda x, y, weight: x.square().sum(axis=1).mean(),
    "mean over samples, sum over classes": lambda x, y, weight: x.square().mean(axis=0).sum(),
    "decay": lambda x, y, weight: F.cross_entropy(x, y) + 0.5 * l2(weight) + paddle.sum(paddle.abs(weight)),
    "decay per sample": lambda x, y, weight: (F.cross_entropy(x, y, reduction="none") + l2(weight)).mean(),
    "by the count, before": lambda x, y, weight: (x / count(x)).sum(),
    "by the count and more": lambda x, y, weight: x.sum() / paddle.clip(count(x) + 1e-8, min=1.0),
    "by numel": lambda x, y, weight: x.sum() / paddle.numel(x).cast("float32"),
    "by a mask": lambda x, y, weight: (x * mask(y)).sum() / mask(y).sum(),
    "by ones": lambda x, y, weight: x.sum() / paddle.ones_like(x).sum(),
    "by a mask of two unknown dimensions": lambda x, y, weight: (
        sequence(x).sum(axis=1) / paddle.ones_like(sequence(x)).sum(axis=1)
    ).mean(),
    "by a number, which may be that of samples": lambda x, y, weight: x.sum() / 8,
    "by a fed count": lambda x, y, weight: x.sum() / fed([1]),
    "by a fed count without dimensions": lambda x, y, weight: F.cross_entropy(x, y, reduction="sum") / fed([]),
    "by a fed count and more": lambda x, y, weight: l2(weight) + x.sum() / paddle.clip(fed([1]) * 1.0, min=1.0),
    "by a fed whole number": lambda x, y, weight: x.sum() / fed([1], "int64").cast("float32"),
    "times one over a fed count": lambda x, y, weight: paddle.scale(x.sum(), 2.0) * (1.0 / fed([1, 1])),
    "each by a fed count": lambda x, y, weight: (x / fed([1])).sum(),
    "times the number of shares": lambda x, y, weight: F.cross_entropy(x, y) + 3 * x.sum(),
    "one of two unknown dimensions": lambda x, y, weight: sequence(x).sum(axis=1).mean(),
    "softmax over samples": lambda x, y, weight: (F.softmax(x, axis=0) * x).sum(),
    "not linear": lambda x, y, weight: paddle.sqrt(x.square().sum()),
    "fed without a gradient": lambda x, y, weight: x.mean() + y.cast("float32").sum(),
    "cond": lambda x, y, weight: paddle.static.nn.cond(x.mean() > 0, lambda: x.sum(), lambda: x.mean()),
    "fixed batch": lambda x, y, weight: nn.Linear(4, 2)(paddle.static.data("fixed", [8, 4])).sum(),
    "time first": lambda x, y, weight: nn.Linear(4, 2)(paddle.static.data("time", [8, None, 4])).sum(axis=1).mean(),
}


def fed(shape: list[int], dtype: str = "float32") -> Any:
    return paddle.static.data("count", shape, dtype)


def mask(y: Any) -> Any:
    return (y > 1).cast("float32")


def sequence(x: Any) -> Any:
    return x.unsqueeze(1) * paddle.static.data("words", [None, None, 1])


def in_program(make: Loss, ask: Callable[[Any], Any]) -> Any:
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        features, classes = paddle.static.data("features", [None, 4]), paddle.static.data("classes", [None, 1], "int64")
        weight = nn.Linear(4, 4).weight
        return ask(make(F.tanh(paddle.matmul(features, weight)), classes, weight))
