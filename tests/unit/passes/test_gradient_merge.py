"""k micro-batches of n train like one batch of k * n."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train.convert.passes.pipeline import merge_gradients
from fleet_train.errors import ConversionError
from tests.unit.passes.training import Trained, batches, relative_difference

UPDATES, MICRO_SAMPLES = 10, 4

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


def micro_batches(batch: tuple[np.ndarray, np.ndarray], count: int) -> Any:
    return zip(np.split(batch[0], count), np.split(batch[1], count), strict=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("accumulate_steps", "seed"), [(2, 0), (3, 1), (4, 2)])
def test_micro_batches_train_like_the_joint_batch(optimizer: str, accumulate_steps: int, seed: int) -> None:
    paddle.seed(seed)
    joint = Trained(OPTIMIZERS[optimizer])
    merged = Trained(OPTIMIZERS[optimizer], minimize_merged(accumulate_steps))
    start = joint.parameters()
    merged.start_from(joint.state())
    for batch in batches(UPDATES, MICRO_SAMPLES * accumulate_steps, seed):
        joint.step(batch)
        joint.schedule()
        for part in micro_batches(batch, accumulate_steps):
            merged.step(part)
        merged.schedule()  # once per update
    assert relative_difference(joint.parameters(), start) > 1e-2
    assert relative_difference(merged.parameters(), joint.parameters()) < 1e-5
    ours, expected = merged.state(), joint.state()
    assert relative_difference({name: ours[name] for name in expected}, expected) < 1e-5


def test_nothing_moves_between_updates() -> None:
    merged = Trained(OPTIMIZERS["Adam"], minimize_merged(3))
    moved = []
    for batch in batches(6, MICRO_SAMPLES, seed=0):
        before = merged.parameters()
        merged.step(batch)
        moved.append(relative_difference(merged.parameters(), before) > 0)
    assert moved == [False, False, True, False, False, True]


def test_boundary_and_mean_can_be_read_in_the_main_block() -> None:
    merged = Trained(OPTIMIZERS["SGD"], minimize_merged(2))
    mean = next(value for parameter, value in merged.result.pairs if "w_" in parameter.name)
    fetched = [merged.step(batch, [merged.result.boundary, mean]) for batch in batches(4, MICRO_SAMPLES, seed=0)]
    assert [bool(boundary.item()) for boundary, _ in fetched] == [False, True, False, True]
    assert all(np.abs(value).max() > 0 for _, value in fetched)


def test_state_in_the_middle_of_an_update_continues_it() -> None:
    whole = Trained(OPTIMIZERS["Momentum"], minimize_merged(3))
    data = batches(9, MICRO_SAMPLES, seed=3)
    for batch in data[:4]:
        whole.step(batch)
    resumed = Trained(OPTIMIZERS["Momentum"], minimize_merged(3))
    resumed.start_from(whole.state())
    for batch in data[4:]:
        whole.step(batch)
        resumed.step(batch)
    ours, expected = resumed.state(), whole.state()
    assert ours.keys() == expected.keys()
    assert all(np.array_equal(ours[name], expected[name]) for name in ours)


def test_accumulators_are_in_the_state_from_the_start() -> None:
    plain, merged = Trained(OPTIMIZERS["AdamW"]), Trained(OPTIMIZERS["AdamW"], minimize_merged(2))
    added = merged.state().keys() - plain.state().keys()
    assert plain.state().keys() <= merged.state().keys()
    assert sorted(added) == ["gradient_merge_count_0", *(f"{n}@gradient_merge" for n in sorted(plain.parameters()))]


def test_one_step_changes_nothing_in_the_program() -> None:
    plain, merged = Trained(OPTIMIZERS["SGD"]), Trained(OPTIMIZERS["SGD"], minimize_merged(1))
    assert merged.operators() == plain.operators()


def test_zero_steps_are_refused() -> None:
    with pytest.raises(ConversionError, match="accumulate_steps=0"):
        merge_gradients([], 0)
