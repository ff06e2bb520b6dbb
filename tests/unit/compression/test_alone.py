"""PowerSGD in one process: its reference by hand, and properties of the real method for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.engine import HAND_OVER, Stages
from fleet_train.collectives.methods.dense import BucketMethod
from fleet_train.compression.powersgd.description import (
    PowerSgdSettings,
    low_rank_families,
    powersgd_settings,
    random_factor,
)
from fleet_train.compression.powersgd.ranks import PowerSgdMethod
from fleet_train.compression.powersgd.reference import PowerSgdSimulation, orthonormal
from fleet_train.plan import Bucket, TensorSpec
from fleet_train.profile import Profile


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


ALWAYS = PowerSgdSettings(min_compression=0.0)


def powersgd(shapes: Bucket, settings: PowerSgdSettings = ALWAYS) -> PowerSgdMethod:
    return PowerSgdMethod(shapes, Alone(), 1, settings)


METHODS: dict[str, Callable[[Bucket], Any]] = {
    "powersgd": powersgd,
    "powersgd of rank 2": lambda shapes: powersgd(shapes, PowerSgdSettings(rank=2, min_compression=0.0)),
}
EVERY = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


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


def test_what_is_not_set_is_what_the_profile_has() -> None:
    assert powersgd_settings(Profile()) == PowerSgdSettings()


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
