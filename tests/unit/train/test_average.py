"""The weights' moving average against the same sum in numpy, under everything that decides when an update happens."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import DistributedStrategy, fleet
from fleet_train.errors import ConversionError
from fleet_train.train.numerics import WeightAverage
from tests.unit.passes.training import State, Trained, batches

pytestmark = pytest.mark.usefixtures("one_process")

DECAY = 0.7
OPTIMIZERS = {
    "sgd": lambda: paddle.optimizer.SGD(0.1),
    "momentum": lambda: paddle.optimizer.Momentum(0.1, 0.9),
    "adamw": lambda: paddle.optimizer.AdamW(0.01),
}


class Averaged(Trained):
    def __init__(self, make_optimizer: Any, accumulate_steps: int = 1) -> None:
        self.average = WeightAverage(DECAY)
        strategy = DistributedStrategy()
        strategy.accumulate_steps = accumulate_steps

        def minimize(optimizer: Any, loss: Any) -> None:
            distributed = fleet.distributed_optimizer(optimizer, strategy)
            distributed.around_update(self.average.follow)
            distributed.minimize(loss)

        super().__init__(make_optimizer, minimize)

    def averaged(self) -> State:
        with paddle.static.scope_guard(self.scope):
            return self.average.weights()


def expected_average(history: list[State]) -> State:
    """Directly from the definition: weights of an update count (1 - decay) * decay**age, normed to 1."""
    shares = np.array([(1 - DECAY) * DECAY**age for age in reversed(range(len(history)))], np.float64)
    shares /= shares.sum()
    names = history[0]
    return {
        name: sum(share * each[name].astype(np.float64) for share, each in zip(shares, history, strict=True))
        for name in names
    }


def assert_close(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_average_is_that_of_the_weights_after_each_update(optimizer: str) -> None:
    trained = Averaged(OPTIMIZERS[optimizer])
    history = []
    for batch in batches(5, 8, seed=1):
        trained.step(batch)
        history.append(trained.parameters())
        assert_close(trained.averaged(), expected_average(history))


def test_before_the_first_update_it_is_the_weights() -> None:
    trained = Averaged(OPTIMIZERS["sgd"])
    assert_close(trained.averaged(), trained.parameters())


def test_micro_batches_without_an_update_do_not_count() -> None:
    trained = Averaged(OPTIMIZERS["momentum"], accumulate_steps=2)
    history = []
    for number, batch in enumerate(batches(6, 8, seed=2)):
        trained.step(batch)
        if number % 2:
            history.append(trained.parameters())
    assert_close(trained.averaged(), expected_average(history))


def test_average_is_part_of_the_state() -> None:
    trained = Averaged(OPTIMIZERS["sgd"])
    state = trained.state()
    assert {f"{name}@average" for name in trained.parameters()} | {"weight_average_updates"} <= state.keys()


def test_in_place_shows_the_average_and_gives_the_weights_back_even_after_an_error() -> None:
    trained = Averaged(OPTIMIZERS["sgd"])
    for batch in batches(3, 8, seed=3):
        trained.step(batch)
    weights, averaged = trained.parameters(), trained.averaged()
    with paddle.static.scope_guard(trained.scope), contextlib.suppress(RuntimeError), trained.average.in_place():
        assert_close(trained.parameters(), averaged)
        raise RuntimeError
    assert all(np.array_equal(weights[name], value) for name, value in trained.parameters().items())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_senseless_decay_is_refused(decay: float) -> None:
    with pytest.raises(ConversionError, match="must be above 0 and below 1"):
        WeightAverage(decay)
