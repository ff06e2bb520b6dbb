"""PowerSGD in one process: its numpy reference by hand, and properties of the real method for any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from fleet_train.collectives.engine import Progress, carry_out
from fleet_train.collectives.methods.powersgd import PowerSgdMethod
from fleet_train.plan.simulate_methods import PowerSgdSimulation, orthonormal
from fleet_train.profile import Profile
from fleet_train.profile.methods.powersgd import (
    POWERSGD,
    PowerSgdSettings,
    low_rank_families,
    powersgd_reduced_elements,
    powersgd_settings,
    random_factor,
)
from tests.unit.compression.alone import Alone, bucket, normal, step

ALWAYS = PowerSgdSettings(min_compression=0.0)


def test_only_matrices_that_gain_are_compressed() -> None:
    shapes = bucket((100, 100), (100,), (), (8, 4, 5, 5), (4, 3), (100, 100), (0, 5))
    families, whole = low_rank_families(shapes, PowerSgdSettings(rank=2))
    assert [[(m.position, m.shape) for m in family] for family in families] == [
        [(0, (100, 100, 2)), (5, (100, 100, 2))],
        [(3, (8, 100, 2))],  # 216 of 800 elements
    ]
    assert whole == [1, 2, 4, 6]


def test_bound_of_the_compression_is_exclusive() -> None:
    # (8 + 8) * 1 * 4 == 64
    assert low_rank_families(bucket((8, 8)), PowerSgdSettings(min_compression=4.0))[1] == [0]
    assert low_rank_families(bucket((8, 8)), PowerSgdSettings(min_compression=3.9))[1] == []


def test_what_is_not_set_is_what_the_profile_has() -> None:
    assert powersgd_settings(Profile()) == PowerSgdSettings()


def test_rank_is_bounded_by_the_matrix() -> None:
    families, _ = low_rank_families(bucket((3, 50)), PowerSgdSettings(rank=8, min_compression=0.0))
    assert families[0][0].shape == (3, 50, 3)


def test_bytes_of_eight_layers_of_640() -> None:
    layers = bucket(*[(640, 640), (640,)] * 8)
    assert powersgd_reduced_elements(layers, PowerSgdSettings()) == [8 * 640 + 8 * 640, 8 * 640]
    assert [sent.nbytes for sent in POWERSGD.sent(layers, Profile(), False)] == [4 * 16 * 640, 4 * 8 * 640]
    late = Profile(compression="powersgd", powersgd_start_step=1)
    assert [sent.nbytes for sent in POWERSGD.sent(layers, late, False, step=0)] == [4 * 8 * 640 * 641]


def test_what_the_plan_says_is_what_is_reduced() -> None:
    layers, allreduce = bucket((30, 20), (20,), (30, 20), (9, 60)), Alone()
    method = PowerSgdMethod(layers, allreduce, 1, PowerSgdSettings(rank=2, min_compression=1.0))
    step(method, normal(30, 20), normal(20), normal(30, 20), normal(9, 60))
    assert allreduce.elements == powersgd_reduced_elements(layers, PowerSgdSettings(rank=2, min_compression=1.0))


def test_random_factor_is_pinned() -> None:
    # Ranks of different releases or machines must draw the same.
    np.testing.assert_allclose(random_factor(0, "w0", (1, 3)), [[-1.5561413, -0.8359318, -0.404008]], rtol=1e-6)
    assert not np.array_equal(random_factor(0, "w1", (1, 3)), random_factor(0, "w0", (1, 3)))
    assert not np.array_equal(random_factor(0, "w0", (1, 3), step=1), random_factor(0, "w0", (1, 3)))


def test_gram_schmidt_by_hand() -> None:
    columns = np.array([[3.0, 1.0, 6.0], [4.0, 0.0, 8.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(orthonormal(columns), [[0.6, 0.8, 0.0], [0.8, -0.6, 0.0], [0.0, 0.0, 0.0]], atol=1e-12)


def test_reference_on_a_matrix_of_rank_one_by_hand() -> None:
    # The mean of both ranks is [[2, 4], [1, 2]], itself of rank 1: given back at once, whatever the start.
    reference = PowerSgdSimulation(bucket((2, 2)), 2, ALWAYS)
    ranks = [[np.array([[4.0, 0.0], [0.0, 4.0]])], [np.array([[0.0, 8.0], [2.0, 0.0]])]]
    np.testing.assert_allclose(reference.step(ranks)[0], [[2, 4], [1, 2]], atol=1e-12)
    np.testing.assert_allclose(reference.errors[0]["w0"], [[2, -4], [-1, 2]], atol=1e-12)
    np.testing.assert_allclose(reference.errors[1]["w0"], [[-2, 4], [1, -2]], atol=1e-12)


def test_matrix_of_rank_one_is_exact() -> None:
    method = PowerSgdMethod(bucket((2, 2)), Alone(), 1, ALWAYS)
    np.testing.assert_allclose(step(method, [[2, 4], [1, 2]])[0], [[2, 4], [1, 2]], atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(6, 9), (9, 6), (1, 5), (5, 1)])
def test_full_rank_is_exact(rows: int, columns: int) -> None:
    method = PowerSgdMethod(bucket((rows, columns)), Alone(), 1, PowerSgdSettings(rank=9, min_compression=0.0))
    for seed in range(3):
        gradient = normal(rows, columns, seed=seed)
        np.testing.assert_allclose(step(method, gradient)[0], gradient, atol=1e-4)


def test_nothing_is_lost_over_many_steps() -> None:
    method = PowerSgdMethod(bucket((12, 20)), Alone(), 1, ALWAYS)
    gradients = [normal(12, 20, seed=seed) for seed in range(30)]
    given = sum(step(method, gradient)[0] for gradient in gradients)
    error = method.state()["w0.error"].numpy()
    assert np.abs(error).max() > 0.1
    np.testing.assert_allclose(given + error, sum(gradients), atol=1e-4)


def test_repeated_gradient_is_learnt() -> None:
    # Warm start and error feedback: the average update of a constant gradient goes to that gradient.
    method, gradient = PowerSgdMethod(bucket((12, 20)), Alone(), 1, ALWAYS), normal(12, 20)
    updates = [step(method, gradient)[0] for _ in range(200)]
    assert np.linalg.norm(np.mean(updates, axis=0) - gradient) < 0.15 * np.linalg.norm(gradient)


def test_without_error_feedback_nothing_is_remembered() -> None:
    method = PowerSgdMethod(bucket((12, 20)), Alone(), 1, PowerSgdSettings(min_compression=0.0, error_feedback=False))
    step(method, normal(12, 20))
    assert sorted(method.state()) == ["step", "w0.factor"]


def test_gradients_are_whole_before_start_step() -> None:
    settings = PowerSgdSettings(min_compression=0.0, start_step=2)
    method, gradient = PowerSgdMethod(bucket((12, 20)), Alone(), 1, settings), normal(12, 20)
    exact = [bool(np.array_equal(step(method, gradient)[0], gradient)) for _ in range(4)]
    assert exact == [True, True, False, False]


@pytest.mark.parametrize("rank", [1, 3])
def test_zero_gradients_give_zero_and_do_not_stay(rank: int) -> None:
    settings = PowerSgdSettings(rank=rank, min_compression=0.0)
    method = PowerSgdMethod(bucket((12, 20)), Alone(), 1, settings)
    for _ in range(3):
        np.testing.assert_array_equal(step(method, np.zeros((12, 20)))[0], 0.0)
    gradient = np.outer(normal(12), normal(20, seed=1))
    gradient[:rank] = 0.0  # the rows that a QR decomposition of zeros points at
    np.testing.assert_allclose(step(method, gradient)[0], gradient, atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12])
def test_size_of_the_gradient_does_not_matter(size: float) -> None:
    method = PowerSgdMethod(bucket((12, 20)), Alone(), 1, ALWAYS)
    gradient = np.outer(normal(12), normal(20, seed=1)) * size
    for _ in range(3):
        np.testing.assert_allclose(step(method, gradient)[0] / size, gradient / size, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rank", [1, 2])
def test_overflow_is_passed_on_and_forgotten(bad: float, rank: int) -> None:
    method = PowerSgdMethod(bucket((12, 20), (3,)), Alone(), 1, PowerSgdSettings(rank=rank, min_compression=0.0))
    gradient = np.outer(normal(12), normal(20, seed=1))
    spoiled = gradient.copy()
    spoiled[2, 3] = bad
    step(method, gradient, np.ones(3))
    update, whole = step(method, spoiled, np.ones(3))
    assert np.isnan(update).all()
    np.testing.assert_array_equal(whole, 1.0)
    np.testing.assert_allclose(step(method, gradient, np.ones(3))[0], gradient, atol=1e-5)


def test_half_precision_gradients_keep_their_dtype() -> None:
    method = PowerSgdMethod(bucket((12, 20), (3,), dtype="bfloat16"), Alone(), 1, ALWAYS)
    tensors = [paddle.ones([12, 20], "bfloat16"), paddle.ones([3], "bfloat16")]
    updates = carry_out(Progress(method.average(tensors)))
    assert [update.dtype for update in updates] == [paddle.bfloat16, paddle.bfloat16]
    np.testing.assert_array_equal(updates[0].cast("float32").numpy(), 1.0)


def test_state_does_not_change_with_later_steps() -> None:
    method = PowerSgdMethod(bucket((12, 20)), Alone(), 1, ALWAYS)
    step(method, normal(12, 20))
    state = method.state()
    before = {name: value.numpy().copy() for name, value in state.items()}
    step(method, normal(12, 20, seed=1))
    for name, value in state.items():
        np.testing.assert_array_equal(value.numpy(), before[name])


def test_state_of_a_new_method_resets_a_used_one() -> None:
    used, new = (PowerSgdMethod(bucket((12, 20)), Alone(), 1, ALWAYS) for _ in range(2))
    step(used, normal(12, 20))
    used.load_state(new.state())
    np.testing.assert_array_equal(step(used, normal(12, 20, seed=1))[0], step(new, normal(12, 20, seed=1))[0])
