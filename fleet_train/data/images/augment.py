"""Augmentations by name: they read a batch of a dataset and change it with the samples' random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fleet_train.data.core.datasets import Arrays, Dataset
from fleet_train.data.core.rng import Draws
from fleet_train.data.images.corrupt import CorruptImages
from fleet_train.data.images.folder import ImageFolder
from fleet_train.data.images.geometry import IMAGE_AUGMENTATIONS
from fleet_train.errors import DataError

Augmentation = Callable[[Dataset, Draws], Arrays]
"""Reads the samples `draws.indices` of the dataset and augments them. Never used for evaluation."""


def keep(dataset: Dataset, draws: Draws) -> Arrays:
    """The unchanged samples."""
    return dataset.arrays(draws.indices)


def shift(dataset: Dataset, draws: Draws) -> Arrays:
    """Every image shifted by up to one pixel in each direction, padded with zeros: [batch, channels, height, width]."""
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


class ImageAugmentation:
    """Images decoded with one of IMAGE_AUGMENTATIONS; records unreadable ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.corrupt: CorruptImages | None = None

    def __call__(self, dataset: Dataset, draws: Draws) -> Arrays:
        if not isinstance(dataset, ImageFolder):
            raise DataError(f"--augment {self.name} needs images in files (--data_dir); {dataset.name} is none")
        if self.corrupt is None:
            self.corrupt = dataset.corrupt_images()
        return dataset.augmented(draws, self.name, self.corrupt)


AUGMENTATIONS = ("auto", "none", "shift", *(name for name in IMAGE_AUGMENTATIONS if name != "none"))


def augmentation(name: str, dataset: Dataset) -> Augmentation:
    """The named augmentation for that dataset; `auto` is crop_flip for image folders and none for other data."""
    if name not in AUGMENTATIONS:
        raise DataError(f"unknown augmentation {name!r}; known: {', '.join(AUGMENTATIONS)}")
    if isinstance(dataset, ImageFolder):
        return ImageAugmentation(image_augmentation_name(name))
    if name == "shift":
        return shift
    return keep if name in ("auto", "none") else ImageAugmentation(name)


def image_augmentation_name(name: str) -> str:
    """The augmentation for `name` and an image folder: one of IMAGE_AUGMENTATIONS."""
    if name == "auto":
        return "crop_flip"
    if name not in IMAGE_AUGMENTATIONS:
        raise DataError(f"--augment {name} is for data in memory; images take {', '.join(IMAGE_AUGMENTATIONS)}")
    return name
