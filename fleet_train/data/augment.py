"""Augmentations by name: they read a batch of a dataset and change it by the samples' own random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fleet_train.data.datasets import Arrays, Dataset
from fleet_train.data.draws import Draws
from fleet_train.errors import DataError

Augmentation = Callable[[Dataset, Draws], Arrays]
"""Reads the samples `draws.indices` of the dataset, changed. Never used for evaluation."""


def keep(dataset: Dataset, draws: Draws) -> Arrays:
    """The samples as they are."""
    return dataset.arrays(draws.indices)


def shift(dataset: Dataset, draws: Draws) -> Arrays:
    """Every image moved by up to one pixel in each direction, zeros moving in: [batch, channels, height, width]."""
    if len(dataset.sample_shape) != 3:
        raise DataError(
            f"--augment shift needs images [channels, height, width], this data has {list(dataset.sample_shape)}; "
            "use --augment none"
        )
    arrays = dataset.arrays(draws.indices)
    images = arrays["features"]
    count, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    down, right = (draws.uniform(2) * 3).astype(np.int64).T
    return {**arrays, "features": np.ascontiguousarray(windows[np.arange(count), :, down, right])}


AUGMENTATIONS: dict[str, Augmentation] = {"none": keep, "shift": shift}


def augmentation(name: str) -> Augmentation:
    """The named augmentation; DataError with the known names otherwise."""
    if name not in AUGMENTATIONS:
        raise DataError(f"unknown augmentation {name!r}; known: {', '.join(AUGMENTATIONS)}")
    return AUGMENTATIONS[name]
