"""The norm of the gradient in one process: its number, what cannot have one, and the steps in which it is fetched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest

from fleet_train import fleet
from fleet_train.convert.rewrite import UpdatedGradients, insert_gradient_norm
from fleet_train.data import BatchLoader, ShardedBatchSampler
from fleet_train.data.datasets import Arrays
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile
from fleet_train.train import Trainer, TrainerSettings

CLIP = paddle.nn.ClipGradByGlobalNorm(0.01)


def wrapped(clip: Any = None, profile: Profile | None = None) -> Any:
    return fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, grad_clip=clip), profile or Profile())


@pytest.mark.parametrize("clip", [None, CLIP], ids=["plain", "clipped"])
def test_it_is_the_norm_over_all_parameters_before_clipping(small_loss: Any, clip: Any) -> None:
    optimizer = wrapped(clip)
    optimizer.minimize(small_loss)
    norm = optimizer.gradient_norm()
    assert optimizer.gradient_norm().is_same(norm)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    features = np.random.default_rng(3).standard_normal((5, 4)).astype("float32")
    for _ in range(2):
        (found,) = exe.run(feed={"x": features}, fetch_list=[norm])
        # The loss is the mean of x @ w + b over 5 x 3 numbers: each column of w has the gradient mean(x) / 3.
        weight = np.repeat(features.mean(axis=0, dtype="float64")[:, None] / 3, 3, axis=1)
        assert (found.shape, found.dtype) == ((1,), np.float32)
        assert found.item() == pytest.approx(np.sqrt((weight**2).sum() + 3 * (1 / 3) ** 2), rel=1e-6)


def test_parameters_that_are_not_clipped_are_in_it(one_process: None) -> None:
    del one_process
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        spared = paddle.ParamAttr(need_clip=False)
        layer = paddle.nn.Linear(4, 1, bias_attr=spared)
        optimizer = wrapped(CLIP)
        optimizer.minimize(paddle.sum(layer(paddle.static.data("x", [1, 4], "float32"))))
        norm = optimizer.gradient_norm()
        exe = paddle.static.Executor(paddle.CPUPlace())
        exe.run(paddle.static.default_startup_program())
        (found,) = exe.run(feed={"x": np.array([[1, 1, 1, 0]], "float32")}, fetch_list=[norm])
    assert found.item() == pytest.approx(2.0)


def test_one_process_has_it_with_local_sgd_too(small_loss: Any) -> None:
    optimizer = wrapped(profile=Profile(use_local_sgd=True))
    optimizer.minimize(small_loss)
    assert list(optimizer.gradient_norm().shape) == [1]


def test_a_program_whose_norm_nobody_asks_for_is_paddles_own(small_loss: Any) -> None:
    wrapped().minimize(small_loss)
    names = [operator.name() for operator in small_loss.block.program.global_block().ops]
    assert "pd_op.squared_l2_norm" not in names


def test_minimize_comes_first(small_loss: Any) -> None:
    optimizer = wrapped()
    with pytest.raises(ConversionError, match="called before minimize"):
        optimizer.gradient_norm()
    optimizer.minimize(small_loss)
    optimizer.gradient_norm()


def test_an_embeddings_rows_count_as_often_as_they_are_used(one_process: None) -> None:
    """With sparse=True, too, gradients are dense in today's programs."""
    del one_process
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        words = paddle.static.data("words", [None], "int64")
        optimizer = wrapped()
        optimizer.minimize(paddle.sum(paddle.nn.Embedding(7, 3, sparse=True)(words)))
        norm = optimizer.gradient_norm()
        exe = paddle.static.Executor(paddle.CPUPlace())
        exe.run(paddle.static.default_startup_program())
        (found,) = exe.run(feed={"words": np.array([1, 1, 4])}, fetch_list=[norm])
    assert found.item() == pytest.approx(np.sqrt(3 * 2**2 + 3 * 1**2))


def test_selected_rows_are_refused_by_their_name() -> None:
    rows = SimpleNamespace(is_dense_tensor_type=lambda: False)
    updated = UpdatedGradients(None, [(SimpleNamespace(name="words_table"), rows)])
    with pytest.raises(ConversionError, match=r"gradient of 'words_table' is sparse .* sparse=False"):
        insert_gradient_norm(updated)


class Features:
    num_samples = 16

    def arrays(self, indices: Any) -> Arrays:
        return {"x": np.ones((len(indices), 4), "float32")}


class Sink:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, scalars: Any) -> None:
        if "train/gradient_norm" in scalars:
            self.steps.append(step)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("merged", "log_every", "frequency", "expected"),
    [(1, 3, 1, [3, 6, 11, 14]), (2, 1, 1, [1, 2, 3, 4, 5, 6, 7, 8]), (1, 3, 5, [6, 11, 16]), (1, 20, 1, [8, 16])],
)
def test_it_is_fetched_in_the_steps_that_are_recorded_only(
    small_loss: Any, merged: int, log_every: int, frequency: int, expected: list[int]
) -> None:
    optimizer = wrapped(profile=Profile(accumulate_steps=merged, fetch_frequency=frequency))
    optimizer.minimize(small_loss)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    sink, real, fetched = Sink(), exe.run, []

    def run(*args: Any, **options: Any) -> Any:
        fetched.append(len(options["fetch_list"]))
        return real(*args, **options)

    settings = TrainerSettings(epochs=2, log_every=log_every)
    loader = BatchLoader(Features(), ShardedBatchSampler(16, 2, 0, 1))
    with mock.patch.object(exe, "run", run):
        Trainer(exe, small_loss, loader, settings, gradient_norm=optimizer.gradient_norm(), sinks=[sink]).fit()
    assert sink.steps == expected
    assert [run // merged + 1 for run, values in enumerate(fetched) if values == 2] == expected
