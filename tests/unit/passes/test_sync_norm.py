"""The composed batch norm is Paddle's batch norm; with several ranks: tests/parallel/test_passes.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train.convert.passes.norm_arithmetic import Arithmetic, Composed, Kernels
from fleet_train.convert.passes.sync_norm import synchronize_batch_norms
from fleet_train.errors import ConversionError
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches, relative_difference


class SameBatchOn:
    """An exchange with ranks that all bring what this one brings."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.order: list[str] = []

    def start(self) -> Any:
        return None

    def gather(self, what: str, values: Any, chain: Any) -> tuple[Any, Any]:
        self.order.append(what)
        return paddle.tile(values.reshape([1, -1]), [self.world_size, 1]), chain

    def total(self, what: str, values: Any, chain: Any) -> tuple[Any, Any]:
        self.order.append(what)
        return values * float(self.world_size), chain


ARITHMETICS = {"kernels": Kernels(), "composed": Composed()}


@pytest.fixture(params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest) -> Arithmetic:
    return ARITHMETICS[request.param]


def minimize_synchronized(exchange: Any, arithmetic: Arithmetic = ARITHMETICS["kernels"]) -> Any:
    def minimize(optimizer: Any, loss: Any) -> Any:
        pairs = synchronize_batch_norms(optimizer.backward(loss), exchange, arithmetic)
        optimizer.apply_gradients(pairs)
        return pairs

    return minimize


def normalised(features: Any) -> Any:
    """Batch norm over images in both layouts, over vectors, used twice, and one that is frozen."""
    image = nn.Conv2D(1, 4, 3, padding=1)(features.reshape([-1, 1, 4, 4]))
    image = F.tanh(nn.BatchNorm2D(4)(image)).transpose([0, 2, 3, 1])
    image = nn.BatchNorm2D(4, momentum=0.5, epsilon=1e-3, data_format="NHWC")(image) + image
    vector = nn.BatchNorm1D(64, use_global_stats=True)(image.flatten(1))
    vector = nn.Linear(64, 8)(vector)
    shared = nn.BatchNorm1D(8)
    return nn.Linear(8, CLASSES)(shared(F.tanh(shared(vector))))


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_paddle_on_equal_batches(world_size: int, seed: int, arithmetic: Arithmetic) -> None:
    paddle.seed(seed)
    plain = Trained(momentum, network=normalised)
    start = plain.state()
    synchronized = Trained(momentum, minimize_synchronized(SameBatchOn(world_size), arithmetic), normalised)
    synchronized.start_from(start)
    for batch in batches(10, 12, seed):
        expected, found = plain.step(batch), synchronized.step(batch)
        assert found == pytest.approx(expected, rel=1e-5)
    assert relative_difference(plain.state(), start) > 1e-2
    # running statistics as well
    assert relative_difference(synchronized.state(), plain.state(), floor=0.1) < 1e-5


def test_every_batch_norm_but_the_frozen_one_is_replaced() -> None:
    trained = Trained(momentum, minimize_synchronized(SameBatchOn(2)), normalised)
    assert trained.operators().count("pd_op.batch_norm_") == 1
    assert trained.operators().count("pd_op.batch_norm_grad") == 1


def test_exchanges_follow_one_order() -> None:
    exchange = SameBatchOn(2)
    Trained(momentum, minimize_synchronized(exchange), normalised)
    names = ["batch_norm2d_0.w_0", "batch_norm2d_1.w_0", "batch_norm1d_1.w_0", "batch_norm1d_1.w_0"]
    forward = [f"statistics of '{name}'" for name in names]
    assert exchange.order == forward + [f"gradient of '{name}'" for name in reversed(names)]


def test_large_mean_does_not_cancel() -> None:
    """sum(x * x) - mean * mean would lose everything: float32 has 7 digits, and 1e4 squared needs 8 before the dot."""
    trained = Trained(
        momentum, minimize_synchronized(SameBatchOn(2)), lambda x: nn.BatchNorm1D(FEATURES)(x)[:, :CLASSES]
    )
    features, labels = batches(1, 64, seed=0)[0]
    before = trained.state()
    trained.step((features + 1e4, labels))
    variance = (trained.state()["batch_norm1d_0.w_2"] - 0.9 * before["batch_norm1d_0.w_2"]) / 0.1
    np.testing.assert_allclose(variance, (features + np.float32(1e4)).astype("float64").var(0), rtol=1e-3)


def test_program_without_batch_norm_is_left_alone() -> None:
    exchange = SameBatchOn(2)
    plain, synchronized = Trained(momentum), Trained(momentum, minimize_synchronized(exchange))
    assert synchronized.operators() == plain.operators()
    assert exchange.order == []


def test_batch_norm_in_a_branch_is_refused() -> None:
    def hidden(features: Any) -> Any:
        norm, linear = nn.BatchNorm1D(FEATURES), nn.Linear(FEATURES, CLASSES)
        return linear(paddle.static.nn.cond(features.sum() > 0, lambda: norm(features), lambda: features))

    with pytest.raises(ConversionError, match=r"sync_batch_norm: .* control-flow block"):
        Trained(momentum, minimize_synchronized(SameBatchOn(2)), hidden)
