"""A scaled loss trains like an unscaled one, and an overflow changes the scale and nothing else.

float16 needs a GPU; overflows are provoked in float32, by features that are too large.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train.convert.passes.pipeline import LossScaler, merge_gradients
from fleet_train.profile import Profile
from tests.unit.passes.training import Trained, batches, loss_scaling, relative_difference

OPTIMIZERS = {
    "SGD": lambda: paddle.optimizer.SGD(0.1),
    "Momentum": lambda: paddle.optimizer.Momentum(0.05, 0.9),
    "Adam": lambda: paddle.optimizer.Adam(0.01, epsilon=1e-3),
    "AdamW": lambda: paddle.optimizer.AdamW(
        0.01, epsilon=1e-3, weight_decay=0.05, grad_clip=nn.ClipGradByGlobalNorm(0.1)
    ),
}
SCALE_STATE = {"loss_scaling_0", "loss_scaling_good_steps_0", "loss_scaling_bad_steps_0"}


def minimize_scaled(settings: Profile, accumulate_steps: int = 1) -> Any:
    def minimize(optimizer: Any, loss: Any) -> None:
        scaler = LossScaler(settings)
        merged = merge_gradients(optimizer.backward(scaler.scaled(loss)), accumulate_steps)
        merged.apply(lambda: scaler.apply(merged.pairs, optimizer.apply_gradients))

    return minimize


def overflowing(batch: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.full_like(batch[0], np.inf), batch[1]


def scale_of(trained: Trained) -> float:
    return float(trained.state()["loss_scaling_0"].item())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_scaled_loss_trains_like_an_unscaled_one(optimizer: str, seed: int) -> None:
    paddle.seed(seed)
    plain = Trained(OPTIMIZERS[optimizer])
    scaled = Trained(OPTIMIZERS[optimizer], minimize_scaled(loss_scaling(incr_every_n_steps=4)))
    scaled.start_from(plain.state())
    for batch in batches(10, 8, seed):
        assert scaled.step(batch) == pytest.approx(plain.step(batch), rel=1e-5)  # the fetched loss is not scaled
    assert relative_difference(scaled.parameters(), plain.parameters()) < 1e-5
    assert scale_of(scaled) == 32768 * 2 * 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_overflow_changes_nothing_but_the_scale(optimizer: str) -> None:
    trained = Trained(OPTIMIZERS[optimizer], minimize_scaled(loss_scaling(decr_every_n_nan_or_inf=1, decr_ratio=0.5)))
    first, second, third = batches(3, 8, seed=0)
    trained.step(first)
    before = trained.state()
    trained.step(overflowing(second))
    after = trained.state()
    assert [name for name in before if not np.array_equal(before[name], after[name])] == [
        name for name in before if name in SCALE_STATE - {"loss_scaling_bad_steps_0"}
    ]
    assert scale_of(trained) == 32768 / 2
    trained.step(third)
    assert all(np.isfinite(value).all() for value in trained.state().values())
    assert relative_difference(trained.parameters(), {n: before[n] for n in trained.parameters()}) > 0


def test_scale_falls_after_that_many_overflows_in_a_row() -> None:
    trained = Trained(OPTIMIZERS["SGD"], minimize_scaled(loss_scaling(init_loss_scaling=100.0)))
    batch = batches(1, 8, seed=0)[0]
    scales = []
    for overflow in (True, False, True, True, True, True):
        trained.step(overflowing(batch) if overflow else batch)
        scales.append(scale_of(trained))
    assert scales == pytest.approx([100, 100, 100, 80, 80, 64])


def test_static_scale_stays_and_still_skips() -> None:
    settings = loss_scaling(init_loss_scaling=128.0, dynamic_loss_scaling=False)
    trained = Trained(OPTIMIZERS["Momentum"], minimize_scaled(settings))
    before = trained.state()
    for batch in batches(3, 8, seed=0):
        trained.step(overflowing(batch))
    assert all(np.array_equal(before[name], value) for name, value in trained.state().items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_overflow_in_one_micro_batch_skips_the_whole_update(optimizer: str) -> None:
    paddle.seed(0)
    settings = loss_scaling(decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    trained = Trained(OPTIMIZERS[optimizer], minimize_scaled(settings, accumulate_steps=2))
    plain = Trained(OPTIMIZERS[optimizer])
    plain.start_from(trained.state())
    data = batches(4, 8, seed=0)
    trained.step(overflowing(data[0]))
    assert scale_of(trained) == 32768  # decided at the update
    trained.step(data[1])
    assert scale_of(trained) == 32768 / 2
    trained.step(data[2])
    trained.step(data[3])
    plain.step((np.concatenate([data[2][0], data[3][0]]), np.concatenate([data[2][1], data[3][1]])))
    assert relative_difference(trained.parameters(), plain.parameters()) < 1e-5


def test_scale_and_its_counters_are_state() -> None:
    trained = Trained(OPTIMIZERS["SGD"], minimize_scaled(loss_scaling()))
    assert trained.state().keys() >= SCALE_STATE
