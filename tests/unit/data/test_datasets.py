"""Datasets: fixed splits, exact dtypes, deterministic synthetic data, and a loader over them."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fleet_train.data import (
    ArrayDataset,
    BatchLoader,
    Draws,
    ShardedBatchSampler,
    augmentation,
    digits,
    load_splits,
    synthetic,
)
from fleet_train.errors import DataError


def test_digits_have_a_fixed_stratified_split() -> None:
    train, test = digits()
    assert (train.num_samples, test.num_samples) == (1438, 359)
    assert train.sample_shape == (1, 8, 8)
    assert train.num_classes == 10
    labels = test.arrays(np.arange(test.num_samples))["labels"]
    assert np.bincount(labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]


def test_digits_are_scaled_float32_with_int64_labels() -> None:
    arrays = digits().train.arrays(np.arange(1438))
    assert arrays["features"].dtype == np.float32
    assert arrays["labels"].dtype == np.int64
    assert (arrays["features"].min(), arrays["features"].max()) == (0.0, 1.0)


def test_no_digit_is_in_both_parts() -> None:
    train, test = (part.arrays(np.arange(part.num_samples))["features"] for part in digits())
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()


def test_synthetic_data_is_the_same_each_time_and_differs_by_seed() -> None:
    def first(seed: int) -> bytes:
        return synthetic(num_samples=8, seed=seed).train.arrays(np.arange(8))["features"].tobytes()

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_synthetic_sizes_are_as_asked() -> None:
    train, test = synthetic(num_samples=40, sample_shape=(3, 4, 4), num_classes=7)
    assert (train.num_samples, test.num_samples, train.sample_shape, train.num_classes) == (40, 10, (3, 4, 4), 7)


def test_unknown_data_lists_the_known_names() -> None:
    with pytest.raises(DataError, match="unknown data 'imagenet'; known: digits, synthetic, synthetic:<ch"):
        load_splits("imagenet")


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.zeros((3, 2), np.float32), np.zeros(2, np.int64), "3 samples but 2 labels"),
        (np.zeros((2, 2), np.float64), np.zeros(2, np.int64), "float64"),
        (np.zeros((2, 2), np.float32), np.array([0, 5], np.int64), "allows 0 to 4"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(features: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrayDataset("own", features, labels, num_classes=5)


def test_loader_gives_the_samplers_batches_and_their_indices() -> None:
    train = synthetic(num_samples=20).train
    loader = BatchLoader(train, ShardedBatchSampler(20, 4, 0, 2, seed=9))
    assert len(loader) == 3
    with loader.epoch(2, consumed_samples=8) as feeds:
        labels = [feed["labels"].tolist() for feed in feeds]
    assert len(loader) == 2
    assert [loader.consumed_after(steps) for steps in (0, 1, 2)] == [8, 16, 20]
    sampler = ShardedBatchSampler(20, 4, 0, 2, seed=9)
    sampler.set_epoch(2)
    assert labels == [train.arrays(sampler.batch(step))["labels"].tolist() for step in (1, 2)]
    assert [loader.indices(step).tolist() for step in (0, 1)] == [sampler.batch(step).tolist() for step in (1, 2)]


def test_shift_moves_each_image_by_at_most_one_pixel_and_fills_with_zeros() -> None:
    image = np.zeros((1, 1, 5, 5), np.float32)
    image[0, 0, 2, 2] = 1.0
    points = ArrayDataset("points", np.repeat(image, 200, axis=0), np.zeros(200, np.int64), num_classes=1)
    shifted = augmentation("shift", points)(points, Draws(0, 0, np.arange(200)))["features"]
    assert shifted.shape == (200, 1, 5, 5)
    places = {(int(y), int(x)) for y, x in zip(*np.nonzero(shifted[:, 0])[1:], strict=True)}
    assert places == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}
    assert shifted.sum() == 200.0


def test_a_sample_is_augmented_alike_on_every_rank_and_differently_in_each_epoch() -> None:
    data = synthetic(num_samples=8).train

    def images(rank: int, world_size: int, epoch: int) -> dict[int, bytes]:
        sampler = ShardedBatchSampler(8, 4, rank, world_size, seed=1)
        loader = BatchLoader(data, sampler, augmentation("shift", data))
        with loader.epoch(epoch) as feeds:
            pairs = [(loader.indices(step), feed["features"]) for step, feed in enumerate(feeds)]
        return {int(i): image.tobytes() for indices, batch in pairs for i, image in zip(indices, batch, strict=True)}

    alone = images(0, 1, epoch=3)
    assert alone == {**images(0, 2, epoch=3), **images(1, 2, epoch=3)}
    assert sorted(alone) == list(range(8))
    assert alone != images(0, 1, epoch=4)


def test_draws_are_uniform_and_depend_on_seed_epoch_and_sample() -> None:
    numbers = Draws(1, 2, np.arange(20_000)).uniform(3)
    assert numbers.shape == (20_000, 3)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    histogram = np.array([np.histogram(column, bins=10, range=(0, 1))[0] for column in numbers.T])
    assert abs(histogram - 2000).max() < 200  # 4.7 standard deviations
    assert abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03
    one = Draws(1, 2, np.array([7])).uniform(3)
    assert one.tolist() == numbers[7:8].tolist()
    others = [Draws(2, 2, np.array([7])), Draws(1, 3, np.array([7])), Draws(2, 1, np.array([7]))]
    assert len({one.tobytes(), *(other.uniform(3).tobytes() for other in others)}) == 4


def test_shift_refuses_what_is_no_image() -> None:
    rows = ArrayDataset("rows", np.zeros((2, 3), np.float32), np.zeros(2, np.int64), num_classes=1)
    with pytest.raises(DataError, match="--augment none"):
        augmentation("shift", rows)(rows, Draws(0, 0, np.arange(2)))


def test_unknown_augmentation_lists_the_known_names() -> None:
    with pytest.raises(DataError, match="unknown augmentation 'flip'; known: auto, none, shift"):
        augmentation("flip", synthetic(8).train)
