"""bfloat16 in numpy: rounding, and the order of Gloo's sums."""

from __future__ import annotations

import math

import numpy as np
import paddle

from fleet_train.plan.simulate_methods import ring_sum_16_bit, to_bfloat16

ULP = 2.0**-7  # from 1 to the next bfloat16


def test_rounds_to_nearest_and_ties_to_even() -> None:
    values = np.array([1.0, 1 + ULP / 2, 1 + ULP, 1 + 1.5 * ULP, 1 + 0.51 * ULP, -1 - ULP / 2], "float32")
    expected = np.array([1.0, 1.0, 1 + ULP, 1 + 2 * ULP, 1 + ULP, -1.0], "float32")
    np.testing.assert_array_equal(to_bfloat16(values), expected)


def test_special_values_stay() -> None:
    values = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4028235e38], "float32")
    np.testing.assert_array_equal(to_bfloat16(values), [0.0, -0.0, math.inf, -math.inf, math.nan, math.inf])


def test_rounds_as_paddle_does() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype("float32") * np.float32(10.0) ** np.arange(
        -20, 20
    ).repeat(250)
    theirs = paddle.to_tensor(values).cast("bfloat16").cast("float32").numpy()
    np.testing.assert_array_equal(to_bfloat16(values), theirs)


def test_sum_of_three_depends_on_the_chunk() -> None:
    # Chunks of 2 elements: the first adds ranks 2, 1, 0; the second 0, 2, 1; the third 1, 0, 2.
    ranks = [np.full(6, 1.0, "float32"), np.full(6, ULP / 2, "float32"), np.full(6, ULP / 2, "float32")]
    np.testing.assert_array_equal(ring_sum_16_bit(ranks, to_bfloat16), [1 + ULP, 1 + ULP, 1.0, 1.0, 1.0, 1.0])
