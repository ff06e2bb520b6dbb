"""The composed batch norm is Paddle's batch norm; with several ranks: tests/parallel/test_passes.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train.collectives.sync_batch_norm import Statistics
from fleet_train.convert.passes.sync_norm import Arithmetic, Composed, Kernels, synchronize_batch_norms
from fleet_train.errors import ConversionError
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches, relative_difference


class SameBatchOn:
    """An exchange with ranks that all bring what this one brings."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.order: list[str] = []

    def start(self) -> Any:
        return None

    def combine(self, what: str, local: Any, chain: Any) -> Any:
        self.order.append(what)
        counts = [(paddle.numel(each.values) // each.mean.shape[0]).cast(each.mean.dtype) for each in local]
        return [
            Statistics(self.world_size * count, each.mean, each.variance)
            for count, each in zip(counts, local, strict=True)
        ], chain

    def average(self, what: str, sums: Any, counts: Any, chain: Any, unread: Any = ()) -> Any:  # noqa: ARG002
        self.order.append(what)
        means = [
            (bias * float(self.world_size) / count, scale * float(self.world_size) / count)
            for (bias, scale), count in zip(sums, counts, strict=True)
        ]
        return means, chain


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
    assert_equal_to_paddle(normalised, world_size, seed, arithmetic)


def assert_equal_to_paddle(network: Any, world_size: int, seed: int, arithmetic: Arithmetic) -> None:
    paddle.seed(seed)
    plain = Trained(momentum, network=network)
    start = plain.state()
    synchronized = Trained(momentum, minimize_synchronized(SameBatchOn(world_size), arithmetic), network)
    synchronized.start_from(start)
    for batch in batches(10, 12, seed):
        expected, found = plain.step(batch), synchronized.step(batch)
        assert found == pytest.approx(expected, rel=1e-5)
    assert relative_difference(plain.state(), start) > 1e-2
    # running statistics as well
    assert relative_difference(synchronized.state(), plain.state(), floor=0.1) < 1e-5


def test_every_batch_norm_but_the_frozen_one_is_replaced() -> None:
    trained = Trained(momentum, minimize_synchronized(SameBatchOn(2), Composed()), normalised)
    assert trained.operators().count("pd_op.batch_norm_") == 1
    assert trained.operators().count("pd_op.batch_norm_grad") == 1


def test_kernels_pass_over_the_values_as_often_as_documented() -> None:
    """Forward once for the statistics and once to normalise, backward once more for what the sums change."""
    trained = Trained(momentum, minimize_synchronized(SameBatchOn(2)), normalised)
    assert trained.operators().count("pd_op.batch_norm_") == 1
    assert trained.operators().count("pd_op.batch_norm") == 3 * 4
    assert trained.operators().count("pd_op.batch_norm_grad") == 1 + 4


def test_exchanges_follow_one_order() -> None:
    exchange = SameBatchOn(2)
    Trained(momentum, minimize_synchronized(exchange), normalised)
    names = ["batch_norm2d_0.w_0", "batch_norm2d_1.w_0", "batch_norm1d_1.w_0", "batch_norm1d_1.w_0"]
    forward = [f"statistics of '{name}'" for name in names]
    assert exchange.order == forward + [f"gradient of '{name}'" for name in reversed(names)]


def residual(features: Any) -> Any:
    """The norm at the end of a branch and the one of its shortcut wait for nothing of one another."""
    image = features.reshape([-1, 1, 4, 4])
    branch = nn.BatchNorm2D(3)(nn.Conv2D(1, 3, 3, padding=1)(image))
    branch = nn.BatchNorm2D(4)(nn.Conv2D(3, 4, 3, padding=1)(F.tanh(branch)))
    shortcut = nn.BatchNorm2D(4, momentum=0.5)(nn.Conv2D(1, 4, 1)(image))
    return nn.Linear(64, CLASSES)(F.tanh(branch + shortcut).flatten(1))


def test_norms_that_do_not_wait_for_each_other_share_an_exchange() -> None:
    exchange = SameBatchOn(2)
    Trained(momentum, minimize_synchronized(exchange), residual)
    first, end, shortcut = (f"'batch_norm2d_{number}.w_0'" for number in range(3))
    assert exchange.order == [
        f"statistics of {first}",
        f"statistics of {end}, {shortcut}",
        f"gradient of {end}, {shortcut}",
        f"gradient of {first}",
    ]


def test_norms_that_share_an_exchange_equal_paddle(arithmetic: Arithmetic) -> None:
    assert_equal_to_paddle(residual, 2, 0, arithmetic)


def in_two_dtypes(features: Any) -> Any:
    """As ``residual``, but the shortcut is computed in float64."""
    image = features.reshape([-1, 1, 4, 4])
    branch = nn.BatchNorm2D(1)(nn.Conv2D(1, 1, 3, padding=1)(image))
    paddle.set_default_dtype("float64")
    shortcut = nn.BatchNorm2D(1)(image.cast("float64"))
    paddle.set_default_dtype("float32")
    return nn.Linear(16, CLASSES)(F.tanh(branch.cast("float64") + shortcut).cast("float32").flatten(1))


def test_norms_of_another_dtype_have_an_exchange_and_digits_of_their_own() -> None:
    exchange = SameBatchOn(2)
    plain = Trained(momentum, lambda optimizer, loss: optimizer.backward(loss), in_two_dtypes)
    synchronized = Trained(
        momentum,
        lambda optimizer, loss: synchronize_batch_norms(optimizer.backward(loss), exchange, Kernels()),
        in_two_dtypes,
    )
    synchronized.start_from(plain.state())
    assert len(exchange.order) == 4
    batch = batches(1, 12, seed=0)[0]
    ours, expected = (
        trained.step(batch, [gradient for _, gradient in trained.result]) for trained in (synchronized, plain)
    )
    assert "float64" in {str(gradient.dtype) for gradient in ours}
    for found, wanted in zip(ours, expected, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [[-1, FEATURES], [-1, FEATURES, 1, 1]])
def test_a_single_value_per_channel_is_its_own_mean(shape: list[int], arithmetic: Arithmetic) -> None:
    """Paddle's kernel hands a single value on without looking at it."""
    network = lambda x: nn.Linear(FEATURES, CLASSES)(norm_of(len(shape))(x.reshape(shape)).flatten(1))  # noqa: E731
    trained = Trained(momentum, minimize_synchronized(SameBatchOn(2), arithmetic), network)
    features, labels = batches(1, 1, seed=0)[0]
    name = next(name for name in trained.state() if name.startswith("batch_norm") and name.endswith(".w_1"))
    trained.step((features, labels))
    np.testing.assert_allclose(trained.state()[name], 0.1 * features[0], rtol=1e-6)
    np.testing.assert_allclose(trained.state()[name.replace("w_1", "w_2")], np.full(FEATURES, 0.9), rtol=1e-6)


def norm_of(rank: int) -> Any:
    return nn.BatchNorm1D(FEATURES) if rank == 2 else nn.BatchNorm2D(FEATURES)


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
