"""Augmentations by name: a batch and a random generator in, a changed batch out. Never used for evaluation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fleet_train.data.datasets import Arrays
from fleet_train.errors import DataError

Augmentation = Callable[[Arrays, np.random.Generator], Arrays]


def keep(arrays: Arrays, generator: np.random.Generator) -> Arrays:
    """The batch as it is."""
    del generator
    return arrays


def shift(arrays: Arrays, generator: np.random.Generator) -> Arrays:
    """Every image moved by up to one pixel in each direction, zeros moving in: [batch, channels, height, width]."""
    images = arrays["features"]
    if images.ndim != 4:
        raise DataError(
            f"--augment shift needs images [channels, height, width], this data has {list(images.shape[1:])}; "
            "use --augment none"
        )
    count, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    down, right = generator.integers(0, 3, count), generator.integers(0, 3, count)
    return {**arrays, "features": np.ascontiguousarray(windows[np.arange(count), :, down, right])}


AUGMENTATIONS: dict[str, Augmentation] = {"none": keep, "shift": shift}


def augmentation(name: str) -> Augmentation:
    """The named augmentation; DataError with the known names otherwise."""
    if name not in AUGMENTATIONS:
        raise DataError(f"unknown augmentation {name!r}; known: {', '.join(AUGMENTATIONS)}")
    return AUGMENTATIONS[name]
