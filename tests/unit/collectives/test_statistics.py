"""The ranks' statistics combine to those of all values; the exchange itself: tests/parallel/test_passes.py."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fleet_train.collectives.sync_batch_norm import combined, packed

CHANNELS = (3, 5)


def values_of(rank: int, samples: int, dtype: str, mean: float) -> list[np.ndarray]:
    """Of a layer with images and one with vectors; the ranks differ in mean and spread."""
    random = np.random.default_rng(rank)
    shapes = ((samples, CHANNELS[0], 2, 3), (samples, CHANNELS[1]))
    return [((1 + rank) * random.standard_normal(shape) + mean + rank).astype(dtype) for shape in shapes]


def row_of(layers: list[np.ndarray]) -> paddle.Tensor:
    means = [paddle.to_tensor(each.mean(axes_of(each), dtype="float64").astype(each.dtype)) for each in layers]
    variances = [paddle.to_tensor(each.var(axes_of(each), dtype="float64").astype(each.dtype)) for each in layers]
    return packed([paddle.to_tensor(each) for each in layers], means, variances)


def axes_of(values: np.ndarray) -> tuple[int, ...]:
    return tuple(axis for axis in range(values.ndim) if axis != 1)


@pytest.mark.parametrize("samples", [(4, 4), (1, 7), (2, 5, 11)])
@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"), [("float32", 0, 1e-6), ("float64", 0, 1e-13), ("float32", 1e4, 1e-3)]
)
def test_batches_of_different_size_combine_to_the_joint_batch(
    samples: tuple[int, ...], dtype: str, mean: float, tolerance: float
) -> None:
    """With a mean of 1e4, mean(x * x) - mean * mean would be off by more than the variance in float32."""
    ranks = [values_of(rank, count, dtype, mean) for rank, count in enumerate(samples)]
    found = combined(paddle.stack([row_of(layers) for layers in ranks]), CHANNELS)
    assert [each.shape for each in found] == [[1], [3], [3], [1], [5], [5]]
    for layer in range(2):
        joint = np.concatenate([each[layer] for each in ranks]).astype("float64")
        count, average, variance = (each.numpy() for each in found[3 * layer : 3 * layer + 3])
        assert count == joint.size / CHANNELS[layer]
        np.testing.assert_allclose(average, joint.mean(axes_of(joint)), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(variance, joint.var(axes_of(joint)), rtol=tolerance)
