"""Merged micro-batches, scaled losses and the chain of all that communicates: training stays what it is without."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train.convert.passes.pipeline import LossScaler, merge_gradients
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile
from tests.unit.passes.training import Trained, batches, loss_scaling, relative_difference

MICRO_SAMPLES = 4
OPTIMIZERS = {
    "SGD": lambda: paddle.optimizer.SGD(0.1),
    "Momentum": lambda: paddle.optimizer.Momentum(
        paddle.optimizer.lr.StepDecay(0.05, step_size=3, gamma=0.5), 0.9, weight_decay=1e-4
    ),
    "Adam": lambda: paddle.optimizer.Adam(0.01, epsilon=1e-3),
    "AdamW": lambda: paddle.optimizer.AdamW(
        0.01, epsilon=1e-3, weight_decay=0.05, grad_clip=nn.ClipGradByGlobalNorm(0.1)
    ),
}


def minimize_merged(accumulate_steps: int) -> Any:
    def minimize(optimizer: Any, loss: Any) -> Any:
        merged = merge_gradients(optimizer.backward(loss), accumulate_steps)
        merged.apply(lambda: optimizer.apply_gradients(merged.pairs))
        return merged

    return minimize


def test_the_mean_of_three_micro_batches_has_all_digits_of_float64() -> None:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(paddle.static.Scope()):
        x = paddle.static.data("x", [None, 4], "float64")
        weight = paddle.static.create_parameter([4], "float64", default_initializer=nn.initializer.Constant(1.0))
        scale = paddle.static.create_parameter([], "float64", default_initializer=nn.initializer.Constant(1.0))
        optimizer = paddle.optimizer.SGD(0.5)
        merged = minimize_merged(3)(optimizer, (x * weight).sum(axis=1).mean() * scale)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        for _ in range(3):
            found = executor.run(feed={"x": np.ones((2, 4))}, fetch_list=[value for _, value in merged.pairs])
    assert [value.shape for value in found] == [tuple(p.shape) for p, _ in merged.pairs]
    for value in found:
        np.testing.assert_allclose(value, 4.0 if value.shape == () else 1.0, rtol=1e-15)


def micro_batches(batch: tuple[np.ndarray, np.ndarray], count: int) -> Any:
    return zip(np.split(batch[0], count), np.split(batch[1], count), strict=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("accumulate_steps", "seed"), [(2, 0), (3, 1)])
def test_micro_batches_train_like_the_joint_batch(optimizer: str, accumulate_steps: int, seed: int) -> None:
    paddle.seed(seed)
    joint = Trained(OPTIMIZERS[optimizer])
    merged = Trained(OPTIMIZERS[optimizer], minimize_merged(accumulate_steps))
    start = joint.parameters()
    merged.start_from(joint.state())
    for batch in batches(10, MICRO_SAMPLES * accumulate_steps, seed):
        joint.step(batch)
        joint.schedule()
        for part in micro_batches(batch, accumulate_steps):
            merged.step(part)
        merged.schedule()  # once per update
    assert relative_difference(joint.parameters(), start) > 1e-2
    assert relative_difference(merged.parameters(), joint.parameters()) < 1e-5
    ours, expected = merged.state(), joint.state()
    assert relative_difference({name: ours[name] for name in expected}, expected) < 1e-5


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
def test_scaled_loss_trains_like_an_unscaled_one(optimizer: str) -> None:
    paddle.seed(0)
    plain = Trained(OPTIMIZERS[optimizer])
    scaled = Trained(OPTIMIZERS[optimizer], minimize_scaled(loss_scaling(incr_every_n_steps=4)))
    scaled.start_from(plain.state())
    for batch in batches(10, 8, seed=0):
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
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"loss_scaling_0", "loss_scaling_good_steps_0"}
    assert scale_of(trained) == 32768 / 2
    trained.step(third)
    assert all(np.isfinite(value).all() for value in trained.state().values())
    assert relative_difference(trained.parameters(), {n: before[n] for n in trained.parameters()}) > 0


def test_a_static_scale_stays_and_still_skips() -> None:
    settings = loss_scaling(init_loss_scaling=128.0, dynamic_loss_scaling=False)
    static = Trained(OPTIMIZERS["Momentum"], minimize_scaled(settings))
    before = static.state()
    for batch in batches(3, 8, seed=0):
        static.step(overflowing(batch))
    assert [name for name, value in static.state().items() if not np.array_equal(value, before[name])] == []


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


def test_nothing_moves_between_updates_and_the_main_block_knows_their_ends() -> None:
    merged, plain = Trained(OPTIMIZERS["Adam"], minimize_merged(3)), Trained(OPTIMIZERS["Adam"])
    added = merged.state().keys() - plain.state().keys()
    assert sorted(added) == ["gradient_merge_count_0", *(f"{n}@gradient_merge" for n in sorted(plain.parameters()))]
    mean = next(value for parameter, value in merged.result.pairs if "w_" in parameter.name)
    moved, ends = [], []
    for batch in batches(6, MICRO_SAMPLES, seed=0):
        before = merged.parameters()
        boundary, value = merged.step(batch, [merged.result.boundary, mean])
        assert np.abs(value).max() > 0
        moved.append(relative_difference(merged.parameters(), before) > 0)
        ends.append(bool(boundary.item()))
    assert moved == ends == [False, False, True, False, False, True]
    assert Trained(OPTIMIZERS["Adam"], minimize_merged(1)).operators() == plain.operators()
    with pytest.raises(ConversionError, match="accumulate_steps=0"):
        merge_gradients([], 0)
