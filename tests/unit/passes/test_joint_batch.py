"""What a loss takes over the batch, with every kind of loss that a program may have.

One process stands for three ranks that were fed alike: a value that they would exchange is then this process's own, and
the joint batch is three times its batch.
"""

# ruff: noqa: ARG005  # a loss may need only one of the three

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train.cluster import Cluster
from fleet_train.collectives.job import Job
from fleet_train.collectives.joint_values import JointValues
from fleet_train.convert.passes.joint_batch.kinds import Findings, short
from fleet_train.convert.passes.joint_batch.rewrite import take_over_ranks

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
LOSSES: dict[str, Loss] = {
    "mean over classes, sum over samples": lambda x, y, weight: x.mean(axis=1).sum(),
    "sum over samples, mean over classes": lambda x, y, weight: x.sum(axis=0).mean(),
    "reduction": lambda x, y, weight: F.cross_entropy(x, y, reduction="sum"),
    "nll_loss": lambda x, y, weight: F.nll_loss(F.log_softmax(x), y.reshape([-1]), reduction="sum"),
    "one term of two": lambda x, y, weight: F.cross_entropy(x, y) + 0.5 * x.square().sum(),
    "negative, kept dimensions": lambda x, y, weight: -paddle.log(F.sigmoid(x)).sum(axis=[0, 1], keepdim=True),
    "beside a term by a fed count": lambda x, y, weight: x.sum() + F.square_error_cost(x, x).sum() / fed([1]),
    "reshaped": lambda x, y, weight: x.reshape([-1]).sum(),
    "two unknown dimensions": lambda x, y, weight: sequence(x).sum(),
    "squared norm": lambda x, y, weight: paddle._C_ops.squared_l2_norm(x).sum(),
    "gram matrix": lambda x, y, weight: paddle.matmul(x, x, transpose_x=True).mean(),
    "dcn": lambda x, y, weight: F.cross_entropy(x, y) + cross_net(x, weight),
    "split into samples": lambda x, y, weight: sum(F.tanh(part).mean() for part in paddle.split(x, 2, axis=0)),
    "unbound": lambda x, y, weight: sum(part.square().sum() for part in paddle.unbind(x, axis=1)),
    "chunks": lambda x, y, weight: (paddle.chunk(x, 2, axis=1)[0] * mask(y)).sum() / mask(y).sum(),
    "a slice of the words": lambda x, y, weight: sequence(x)[:, 1:].mean(),
    "the last word": lambda x, y, weight: sequence(x)[:, -1].mean(),
    "a decay counted per sample": lambda x, y, weight: (F.cross_entropy(x, y, reduction="none") + l2(weight)).sum(),
    "split": lambda x, y, weight: paddle.add_n([part.sum() for part in paddle.split(x, 2, axis=1)]),
    "combined": lambda x, y, weight: paddle.stack([x.sum(), x.mean()]).mean(),
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
    "by a fed count": lambda x, y, weight: x.sum() / fed([1]),
    "by a fed count without dimensions": lambda x, y, weight: F.cross_entropy(x, y, reduction="sum") / fed([]),
    "by a fed count and more": lambda x, y, weight: l2(weight) + x.sum() / paddle.clip(fed([1]) * 1.0, min=1.0),
    "by a fed whole number": lambda x, y, weight: x.sum() / fed([1], "int64").cast("float32"),
    "times one over a fed count": lambda x, y, weight: paddle.scale(x.sum(), 2.0) * (1.0 / fed([1, 1])),
    "each by a fed count": lambda x, y, weight: (x / fed([1])).sum(),
    "one of two unknown dimensions": lambda x, y, weight: sequence(x).sum(axis=1).mean(),
    "not linear": lambda x, y, weight: paddle.sqrt(x.square().sum()),
    "fed without a gradient": lambda x, y, weight: x.mean() + y.cast("float32").sum(),
}

# What a script of one process says, and what one that knows of its three ranks says for the same.
ALREADY: dict[str, tuple[Loss, Loss]] = {
    "by the number of a rank's samples": (lambda x, y, weight: x.sum() / 24, lambda x, y, weight: x.sum() / 8),
    "dssm": (lambda x, y, weight: hit_loss(x, 24), lambda x, y, weight: hit_loss(x, 8)),
    "times the number of shares": (
        lambda x, y, weight: F.cross_entropy(x, y) + x.sum(),
        lambda x, y, weight: F.cross_entropy(x, y) + 3 * x.sum(),
    ),
}
UNDECIDED: dict[str, Loss] = {
    "softmax over samples": lambda x, y, weight: (F.softmax(x, axis=0) * x).sum(),
    "beside an unknown term": lambda x, y, weight: x.sum() + paddle.logsumexp(x),
    "one sample": lambda x, y, weight: x[0].sum(),
    "cond": lambda x, y, weight: paddle.static.nn.cond(x.mean() > 0, lambda: x.sum(), lambda: x.mean()),
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


CPU, RANKS, SAMPLES = paddle.CPUPlace(), 3, 8


def gradients(make: Loss, ranks: int) -> tuple[list[Any], Findings]:
    """Of the weights, on one of so many ranks, and what was found about the loss."""
    main, startup, job = paddle.static.Program(), paddle.static.Program(), Job(Cluster.imagined(1, ranks), CPU)
    paddle.seed(7)
    with paddle.static.program_guard(main, startup):
        features, classes = paddle.static.data("features", [None, 4]), paddle.static.data("classes", [None, 1], "int64")
        weight = nn.Linear(4, 4).weight
        taken = take_over_ranks(make(F.tanh(paddle.matmul(features, weight)), classes, weight), job, 1)
        pairs = paddle.static.append_backward(taken.value)
        exe = paddle.static.Executor(CPU)
        exe.run(startup)
        fetched = [gradient for _, gradient in pairs if gradient is not None]
        found = exe.run(main, feed=feed(main, RANKS // ranks), fetch_list=fetched)
    return found, taken.found


def feed(main: Any, times: int) -> dict[str, Any]:
    made = np.random.default_rng(3)
    samples: dict[str, Any] = {
        "features": made.normal(size=(SAMPLES, 4)).astype("float32"),
        "classes": made.integers(0, 4, (SAMPLES, 1)),
        "words": made.normal(size=(SAMPLES, 5, 1)).astype("float32"),
    }
    fed = {}
    for operator in main.global_block().ops:
        if operator.name() == "pd_op.data":
            name, value = operator.attrs()["name"], operator.result(0)
            if name == "count":
                fed[name] = np.full(value.shape, times * SAMPLES, "int64" if "int" in str(value.dtype) else "float32")
            else:
                fed[name] = np.concatenate([samples[name]] * times)
    return fed


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have the counts of this process."""
    monkeypatch.setattr(Job, "compare", lambda *_: "")
    monkeypatch.setattr(JointValues, "start_means", lambda *_: None)
    monkeypatch.setattr(JointValues, "means", lambda _, __, values: list(values))


@pytest.mark.parametrize("name", [*LOSSES, *ALREADY])
def test_the_gradient_is_the_joint_batchs(name: str) -> None:
    alone, ours = ALREADY[name] if name in ALREADY else (LOSSES[name], LOSSES[name])
    expected, _ = gradients(alone, 1)
    found, findings = gradients(ours, RANKS)
    assert [short(operator) for operator, _ in findings.undecided] == []
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def test_what_a_constant_is_taken_as_is_found() -> None:
    _, ours = ALREADY["dssm"]
    assert [what for _, what in gradients(ours, RANKS)[1].assumed] == ["the number of samples of a rank"]


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_is_not_decided_is_found(name: str) -> None:
    assert gradients(UNDECIDED[name], RANKS)[1].undecided
