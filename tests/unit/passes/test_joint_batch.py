"""What a loss takes over the batch, with every kind of loss that a program may have.

One process stands for three ranks that were fed alike: a value that they would exchange is then this process's own, and
the joint batch is three times its batch.
"""

# ruff: noqa: ARG005  # a loss may need only one of the three

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from fleet_train.cluster import Cluster
from fleet_train.collectives.job import Job
from fleet_train.collectives.joint_values import JointValues
from fleet_train.convert import process
from fleet_train.convert.passes.joint_batch.kinds import Findings, short
from fleet_train.convert.passes.joint_batch.rewrite import take_over_ranks
from tests.unit.passes.losses import OTHERS, SUMS, Loss, hit_loss, in_program, mask, sequence

# Of a batch whose size is known three times as many samples cannot be fed.
OF_FIXED_SIZE = ("fixed batch", "time first")
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
    "softmax over samples": (SUMS | OTHERS)["softmax over samples"],
    "beside an unknown term": (SUMS | OTHERS)["beside an unknown term"],
    "one sample": lambda x, y, weight: x[0].sum(),
    "cond": (SUMS | OTHERS)["cond"],
}
OF_SHARES = {**ALREADY, **UNDECIDED, "by a number, which may be that of samples": ()}
LOSSES = {
    **{name: loss for name, loss in (SUMS | OTHERS).items() if name not in (*OF_FIXED_SIZE, *OF_SHARES)},
    "split into samples": lambda x, y, weight: sum(F.tanh(part).mean() for part in paddle.split(x, 2, axis=0)),
    "unbound": lambda x, y, weight: sum(part.square().sum() for part in paddle.unbind(x, axis=1)),
    "chunks": lambda x, y, weight: (paddle.chunk(x, 2, axis=1)[0] * mask(y)).sum() / mask(y).sum(),
    "a slice of the words": lambda x, y, weight: sequence(x)[:, 1:].mean(),
    "the last word": lambda x, y, weight: sequence(x)[:, -1].mean(),
}
CPU, RANKS, SAMPLES = paddle.CPUPlace(), 3, 8


def gradients(make: Loss, ranks: int) -> tuple[list[Any], Findings]:
    """Of the weights, on one of so many ranks, and what was found about the loss."""
    job = Job(Cluster.imagined(1, ranks), CPU)
    paddle.seed(7)

    def derived(loss: Any) -> tuple[list[Any], Findings]:
        taken, main = take_over_ranks(loss, job, 1), loss.block.program
        pairs = paddle.static.append_backward(taken.value)
        exe = paddle.static.Executor(CPU)
        exe.run(paddle.static.default_startup_program())
        fetched = [gradient for _, gradient in pairs if gradient is not None]
        return exe.run(main, feed=feed(main, RANKS // ranks), fetch_list=fetched), taken.found

    result: tuple[list[Any], Findings] = in_program(make, derived)
    return result


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
def alike(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All ranks have the counts of this process."""
    monkeypatch.setattr(Job, "compare", lambda *_: "")
    monkeypatch.setattr(JointValues, "start_means", lambda *_: None)
    monkeypatch.setattr(JointValues, "means", lambda _, __, values: list(values))
    yield
    process.put_back()


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
