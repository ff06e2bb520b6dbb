"""DGC in one process: its numpy reference by hand, and properties of the real method for any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from fleet_train.collectives.engine import Progress, carry_out
from fleet_train.collectives.methods.dgc import DgcMethod
from fleet_train.plan import Bucket
from fleet_train.plan.simulate_methods import DgcSimulation
from fleet_train.profile import Profile
from fleet_train.profile.methods.dgc import (
    DGC,
    DgcSettings,
    dgc_kept_elements,
    dgc_settings,
    kept_elements,
    sparsity_at,
)
from tests.unit.compression.alone import Alone, bucket, normal, step


def alone(shapes: Bucket, settings: DgcSettings) -> DgcMethod:
    return DgcMethod(shapes, None, Alone(), 1, settings)


def test_ramp_of_the_sparsity() -> None:
    settings = DgcSettings(rampup_begin_step=2, rampup_step=6, sparsity=(0.5, 0.75, 0.9))
    shares = [sparsity_at(step, settings) for step in range(10)]
    assert shares == [None, None, 0.5, 0.5, 0.75, 0.75, 0.9, 0.9, 0.9, 0.9]


def test_fleets_default_is_the_last_sparsity_at_once() -> None:
    assert [sparsity_at(step, DgcSettings()) for step in (0, 1, 1000)] == [0.999, 0.999, 0.999]


def test_what_is_not_set_is_what_the_profile_has() -> None:
    assert dgc_settings(Profile(), momentum=0.9) == DgcSettings()


def test_a_ramp_of_two_steps_has_stages_and_one_of_one_step_has_none() -> None:
    asked = {"compression": "dgc", "dgc_sparsity": 0.99}
    ramps = {steps: dgc_settings(Profile(dgc_rampup_steps=steps, **asked)) for steps in (1, 2)}
    assert [sparsity_at(step, ramps[1]) for step in (0, 1)] == [0.99, 0.99]
    # Four stages over two steps: the first and the third, then the last.
    assert [sparsity_at(step, ramps[2]) for step in (0, 1, 2, 3)] == [0.75, 0.984375, 0.99, 0.99]


@pytest.mark.parametrize(
    ("elements", "sparsity", "kept"),
    [(1000, 0.999, 1), (1000, 0.75, 250), (409600, 0.999, 409), (3, 0.999, 1), (10, 0.0, 10), (1, 0.5, 1)],
)
def test_how_many_are_kept(elements: int, sparsity: float, kept: int) -> None:
    assert kept_elements(elements, sparsity) == kept


def test_bytes_of_eight_layers_of_640() -> None:
    layers = bucket(*[(640, 640), (640,)] * 8)
    settings = DgcSettings(rampup_begin_step=1)
    assert dgc_kept_elements(layers, settings, step=0) == (0, 8 * 640 * 641)
    assert dgc_kept_elements(layers, settings, step=1) == (8 * 409, 8 * 640)
    profile = Profile(compression="dgc", dgc_rampup_begin_step=1)
    assert [sent.nbytes for sent in DGC.sent(layers, profile, False)] == [8 * (8 * 409), 4 * (8 * 640)]
    assert [sent.nbytes for sent in DGC.sent(layers, profile, False, step=0)] == [4 * (8 * 640 * 641)]


def test_reference_by_hand() -> None:
    reference = DgcSimulation(bucket((4,)), 2, DgcSettings(momentum=0.5, sparsity=(0.75,), min_elements=0))
    first = [[np.array([8.0, 1.0, 0.0, 2.0])], [np.array([4.0, -6.0, 0.0, 2.0])]]
    np.testing.assert_array_equal(reference.step(first)[0], [4.0, -3.0, 0.0, 0.0])  # 8 and -6 are sent
    np.testing.assert_array_equal(reference.pending, [[[0, 1, 0, 2]], [[4, 0, 0, 2]]])
    np.testing.assert_array_equal(reference.velocities, [[[0, 1, 0, 2]], [[4, 0, 0, 2]]])
    # Velocities [0.5, 0.5, 1, 1] and [2, 0, 0, 2], pending [0, 1.5, 1, 3] and [6, 0, 0, 3]: 3 and 6 are sent.
    second = [[np.array([0.0, 0.0, 1.0, 0.0])], [np.array([0.0, 0.0, 0.0, 1.0])]]
    np.testing.assert_array_equal(reference.step(second)[0], [3.0, 0.0, 0.0, 1.5])
    np.testing.assert_array_equal(reference.pending, [[[0, 1.5, 1, 0]], [[0, 0, 0, 4]]])
    np.testing.assert_array_equal(reference.velocities, [[[0, 0.5, 1, 0]], [[0, 0, 0, 2]]])


def test_reference_clips_each_rank_at_the_bound_over_the_root_of_ranks() -> None:
    settings = DgcSettings(momentum=0.0, sparsity=(0.0,), min_elements=0, local_grad_clip_norm=10.0)
    reference = DgcSimulation(bucket((2,)), 4, settings)
    local = [[np.array([30.0, 40.0])], [np.array([3.0, 4.0])], [np.zeros(2)], [np.zeros(2)]]
    np.testing.assert_allclose(reference.step(local)[0], [(3 + 3) / 4, (4 + 4) / 4])


def test_reference_sends_or_keeps_every_gradient() -> None:
    reference = DgcSimulation(bucket((200, 100)), 2, DgcSettings(momentum=0.0, sparsity=(0.9,)))
    inputs, outputs = np.zeros((200, 100)), np.zeros((200, 100))
    for number in range(5):
        gradients = [normal(200, 100, seed=2 * number + rank) for rank in range(2)]
        inputs += np.mean(gradients, axis=0)
        (sent,) = reference.step([[gradient] for gradient in gradients])
        assert 2000 <= np.count_nonzero(sent) <= 4000  # a tenth of each rank's 20,000
        outputs += sent
    pending = np.mean([rank[0] for rank in reference.pending], axis=0)
    np.testing.assert_allclose(outputs + pending, inputs, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_nothing_held_back_is_momentum(nesterov: bool) -> None:
    settings = DgcSettings(sparsity=(0.0,), use_nesterov=nesterov, min_elements=0, momentum_factor_masking=False)
    method, gradients = alone(bucket((6, 5)), settings), [normal(6, 5, seed=seed) for seed in range(5)]
    weights = paddle.to_tensor(np.zeros((6, 5), "float32"), stop_gradient=False)
    momentum = paddle.optimizer.Momentum(1.0, 0.9, parameters=[weights], use_nesterov=nesterov)
    ours = np.zeros((6, 5), "float32")
    for gradient in gradients:
        ours -= step(method, gradient)[0]
        (weights * paddle.to_tensor(gradient)).sum().backward()
        momentum.step()
        momentum.clear_grad()
    np.testing.assert_allclose(ours, weights.numpy(), rtol=1e-5, atol=1e-6)


def test_masking_takes_the_momentum_of_what_was_sent() -> None:
    method = alone(bucket((6, 5)), DgcSettings(sparsity=(0.0,), min_elements=0))
    for seed in range(3):
        np.testing.assert_array_equal(step(method, normal(6, 5, seed=seed))[0], normal(6, 5, seed=seed))


def test_small_gradients_and_early_steps_have_plain_momentum() -> None:
    settings = DgcSettings(momentum=0.5, rampup_begin_step=2, sparsity=(0.9,), min_elements=10)
    method = alone(bucket((20,), (9,)), settings)
    updates = [step(method, np.ones(20), np.ones(9)) for _ in range(3)]
    assert [float(small[0]) for _, small in updates] == [1.0, 1.5, 1.75]
    assert [float(large[0]) for large, _ in updates[:2]] == [1.0, 1.5]
    # The velocity 1.5 of the whole steps goes on: 2 of 20 elements are sent, with 1.75.
    assert sorted(updates[2][0].tolist())[-3:] == [0.0, 1.75, 1.75]


def test_nothing_is_lost_over_many_steps() -> None:
    method = alone(bucket((40, 50)), DgcSettings(momentum=0.0, sparsity=(0.99,), min_elements=0))
    gradients = [normal(40, 50, seed=seed) for seed in range(30)]
    given = sum(step(method, gradient)[0] for gradient in gradients)
    pending = method.state()["w0.pending"].numpy().reshape(40, 50)
    np.testing.assert_allclose(given + pending, sum(gradients), atol=1e-4)


@pytest.mark.parametrize("shape", [(300, 400), (512, 512)])
@pytest.mark.parametrize("sparsity", [0.3, 0.75, 0.99, 0.9999])
def test_large_gradients_send_exactly_the_largest(sparsity: float, shape: tuple[int, int]) -> None:
    # Large enough for the guessed bound; a sample is each 7th, or each 16th and so each 17th.
    gradient = normal(*shape)
    update = step(alone(bucket(shape), DgcSettings(sparsity=(sparsity,))), gradient)[0]
    kept = kept_elements(gradient.size, sparsity)
    bound = np.sort(np.abs(gradient), axis=None)[-kept]
    np.testing.assert_array_equal(update, np.where(np.abs(gradient) >= bound, gradient, 0))


@pytest.mark.parametrize("columns", [1, 7, 400])
def test_unlike_columns_do_not_spoil_the_selection(columns: int) -> None:
    gradient = normal(300, 400) * 1e-3
    gradient[:, :columns] = 0.0
    gradient[:3] *= 1e6
    update = step(alone(bucket((300, 400)), DgcSettings(sparsity=(0.995,))), gradient)[0]
    np.testing.assert_array_equal(np.abs(update).sum(), np.abs(np.where(update != 0, gradient, 0)).sum())
    assert np.count_nonzero(update) == min(600, np.count_nonzero(gradient))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(40, 50), (300, 400)])
def test_overflow_is_passed_on_and_forgotten(bad: float, shape: tuple[int, int]) -> None:
    method = alone(bucket(shape, (3,)), DgcSettings(sparsity=(0.999,), min_elements=100))
    spoiled = normal(*shape)
    spoiled[5, 6] = bad
    step(method, normal(*shape), np.ones(3))
    assert not np.isfinite(step(method, spoiled, np.ones(3))[0]).all()
    for _ in range(20):
        assert np.isfinite(step(method, normal(*shape), np.ones(3))[0]).all()


def test_overflow_of_a_small_gradient_does_not_enter_the_velocity() -> None:
    method = alone(bucket((3,)), DgcSettings(momentum=0.5))
    step(method, np.ones(3))
    assert np.isnan(step(method, [1.0, math.nan, 1.0])[0]).any()
    np.testing.assert_array_equal(step(method, np.ones(3))[0], 1.5)


def test_updates_keep_the_gradients_dtype() -> None:
    method = alone(bucket((12, 20), (3,), dtype="bfloat16"), DgcSettings(min_elements=100))
    tensors = [paddle.ones([12, 20], "bfloat16"), paddle.ones([3], "bfloat16")]
    assert [update.dtype for update in carry_out(Progress(method.average(tensors)))] == [paddle.bfloat16] * 2


def test_what_was_given_out_is_not_what_is_remembered() -> None:
    method = alone(bucket((20,), (9,)), DgcSettings(momentum=0.5, sparsity=(0.5,), min_elements=10))
    tensors = [paddle.ones([20]), paddle.ones([9])]
    for update in carry_out(Progress(method.average(tensors))):
        update.fill_(100.0)  # a later operator may work in place
    large, small = step(method, np.ones(20), np.ones(9))
    assert float(large.max()) == 2.5  # held back: 1, then 1.5 more
    np.testing.assert_array_equal(small, 1.5)


def test_state_of_a_new_method_resets_a_used_one() -> None:
    settings = DgcSettings(min_elements=100)
    used, new = alone(bucket((12, 20)), settings), alone(bucket((12, 20)), settings)
    step(used, normal(12, 20))
    used.load_state(new.state())
    np.testing.assert_array_equal(step(used, normal(12, 20, seed=1))[0], step(new, normal(12, 20, seed=1))[0])
