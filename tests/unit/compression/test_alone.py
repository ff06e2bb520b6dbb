"""DGC and PowerSGD in one process: references by hand, and properties of the real methods for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.engine import HAND_OVER, Stages
from fleet_train.collectives.methods.dense import BucketMethod
from fleet_train.collectives.methods.dgc import DgcMethod
from fleet_train.collectives.methods.powersgd import PowerSgdMethod
from fleet_train.plan import Bucket, TensorSpec
from fleet_train.plan.simulate_methods import DgcSimulation, PowerSgdSimulation, orthonormal
from fleet_train.profile import Profile
from fleet_train.profile.methods.dgc import (
    DgcSettings,
    dgc_settings,
    kept_elements,
    sparsity_at,
)
from fleet_train.profile.methods.powersgd import (
    PowerSgdSettings,
    low_rank_families,
    powersgd_settings,
    random_factor,
)


class Alone:
    """The allreduce of a job of one rank."""

    averages = False

    def sum(self, buffers: Sequence[Any], more: bool = False, divide_by: int = 1) -> Stages[list[Any]]:
        del more
        assert divide_by == 1
        yield HAND_OVER
        return list(buffers)


def outcome(stages: Stages[Any]) -> Any:
    """What a method returns that has nobody to communicate with."""
    try:
        while True:
            assert not next(stages).collectives
    except StopIteration as end:
        return end.value


def bucket(*shapes: tuple[int, ...], dtype: str = "float32") -> Bucket:
    return Bucket(0, tuple(TensorSpec(f"w{i}", shape, dtype) for i, shape in enumerate(shapes)), 0)


def step(method: BucketMethod, *gradients: Any) -> list[np.ndarray]:
    tensors = [paddle.to_tensor(np.asarray(gradient, "float32")) for gradient in gradients]
    return [np.array(update.numpy()) for update in outcome(method.average(tensors))]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def alone(shapes: Bucket, settings: DgcSettings) -> DgcMethod:
    return DgcMethod(shapes, None, Alone(), 1, settings)


ALWAYS = PowerSgdSettings(min_compression=0.0)


def powersgd(shapes: Bucket, settings: PowerSgdSettings = ALWAYS) -> PowerSgdMethod:
    return PowerSgdMethod(shapes, Alone(), 1, settings)


METHODS: dict[str, Callable[[Bucket], Any]] = {
    "powersgd": powersgd,
    "powersgd of rank 2": lambda shapes: powersgd(shapes, PowerSgdSettings(rank=2, min_compression=0.0)),
    "dgc": lambda shapes: alone(shapes, DgcSettings(momentum=0.0, sparsity=(0.99,), min_elements=100)),
}
EVERY = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


@pytest.mark.parametrize(
    ("elements", "sparsity", "kept"),
    [(1000, 0.999, 1), (1000, 0.75, 250), (409600, 0.999, 409), (3, 0.999, 1), (10, 0.0, 10), (1, 0.5, 1)],
)
def test_how_many_are_kept(elements: int, sparsity: float, kept: int) -> None:
    assert kept_elements(elements, sparsity) == kept


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


def test_what_was_given_out_is_not_what_is_remembered() -> None:
    method = alone(bucket((20,), (9,)), DgcSettings(momentum=0.5, sparsity=(0.5,), min_elements=10))
    tensors = [paddle.ones([20]), paddle.ones([9])]
    for update in outcome(method.average(tensors)):
        update.fill_(100.0)  # a later operator may work in place
    large, small = step(method, np.ones(20), np.ones(9))
    assert float(large.max()) == 2.5  # held back: 1, then 1.5 more
    np.testing.assert_array_equal(small, 1.5)


def test_only_matrices_that_gain_are_compressed() -> None:
    shapes = bucket((100, 100), (100,), (), (8, 4, 5, 5), (4, 3), (100, 100), (0, 5))
    families, whole = low_rank_families(shapes, PowerSgdSettings(rank=2))
    assert [[(m.position, m.shape) for m in family] for family in families] == [
        [(0, (100, 100, 2)), (5, (100, 100, 2))],
        [(3, (8, 100, 2))],  # 216 of 800 elements
    ]
    assert whole == [1, 2, 4, 6]
    # (8 + 8) * 1 * 4 == 64
    assert low_rank_families(bucket((8, 8)), PowerSgdSettings(min_compression=4.0))[1] == [0]
    assert low_rank_families(bucket((8, 8)), PowerSgdSettings(min_compression=3.9))[1] == []
    families, _ = low_rank_families(bucket((3, 50)), PowerSgdSettings(rank=8, min_compression=0.0))
    assert families[0][0].shape == (3, 50, 3), "the matrix bounds the rank"


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


def test_ramp_of_the_sparsity() -> None:
    settings = DgcSettings(rampup_begin_step=2, rampup_step=6, sparsity=(0.5, 0.75, 0.9))
    shares = [sparsity_at(step, settings) for step in range(10)]
    assert shares == [None, None, 0.5, 0.5, 0.75, 0.75, 0.9, 0.9, 0.9, 0.9]
    assert [sparsity_at(step, DgcSettings()) for step in (0, 1, 1000)] == [0.999, 0.999, 0.999]
    asked = {"compression": "dgc", "dgc_sparsity": 0.99}
    ramps = {steps: dgc_settings(Profile(dgc_rampup_steps=steps, **asked)) for steps in (1, 2)}
    assert [sparsity_at(step, ramps[1]) for step in (0, 1)] == [0.99, 0.99]
    # Four stages over two steps: the first and the third, then the last.
    assert [sparsity_at(step, ramps[2]) for step in (0, 1, 2, 3)] == [0.75, 0.984375, 0.99, 0.99]


def test_what_is_not_set_is_what_the_profile_has() -> None:
    assert powersgd_settings(Profile()) == PowerSgdSettings()
    assert dgc_settings(Profile(), momentum=0.9) == DgcSettings()


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(40, 50), (300, 400)])
def test_overflow_is_passed_on_and_forgotten(make: Callable[[Bucket], Any], bad: float, shape: tuple[int, int]) -> None:
    method, gradient = make(bucket(shape, (3,))), np.outer(normal(shape[0]), normal(shape[1], seed=1))
    spoiled = gradient.copy()
    spoiled[5, 6] = bad
    step(method, gradient, np.ones(3))
    update, whole = step(method, spoiled, np.ones(3))
    assert not np.isfinite(update).all()
    np.testing.assert_array_equal(whole, 1.0)
    for _ in range(20):
        assert np.isfinite(step(method, gradient, np.ones(3))[0]).all()


@EVERY
def test_updates_keep_the_gradients_dtype(make: Callable[[Bucket], Any]) -> None:
    method = make(bucket((12, 20), (3,), dtype="bfloat16"))
    tensors = [paddle.ones([12, 20], "bfloat16"), paddle.ones([3], "bfloat16")]
    assert [update.dtype for update in outcome(method.average(tensors))] == [paddle.bfloat16] * 2
