"""The size and the part of an image that are used: sizes, boxes and factors, pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fleet_train.errors import DataError

IMAGE_AUGMENTATIONS = ("none", "crop_flip", "crop_flip_color")
_CROP_TRIES = 10
DRAWS_PER_IMAGE = 2 * _CROP_TRIES + 6
"""Random numbers per image: area and aspect ratio of each try, place (2), flip, three colour factors."""


@dataclass(frozen=True)
class ImageSettings:
    """Images become float32 [3, image_size, image_size], (value / 255 - mean) / std per channel (RGB)."""

    image_size: int = 224
    resize_size: int | None = None
    """For evaluation: length of the shorter side before the middle is cut out. None = image_size * 256 / 224."""
    min_area: float = 0.08
    """Training crops cover at least this share of the image."""
    color_jitter: float = 0.4
    """crop_flip_color multiplies brightness, contrast and saturation by 1 - this to 1 + this."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.image_size < 1 or self.shorter_side < self.image_size:
            raise DataError(
                f"image_size={self.image_size}, resize_size={self.resize_size}: the middle of image_size pixels is cut "
                "out of an image whose shorter side is resize_size; give 1 <= image_size <= resize_size"
            )
        if not 0 < self.min_area <= 1 or not 0 <= self.color_jitter < 1 or min(self.std) <= 0:
            raise DataError(
                f"min_area={self.min_area} must be in (0, 1], color_jitter={self.color_jitter} in [0, 1), "
                f"std={self.std} above 0"
            )

    @property
    def shorter_side(self) -> int:
        return round(self.image_size * 256 / 224) if self.resize_size is None else self.resize_size

    @property
    def shape(self) -> tuple[int, int, int]:
        return (3, self.image_size, self.image_size)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ImageSettings:
        return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})


class Box(NamedTuple):
    """A part of an image in pixels; evaluation boxes may be fractional."""

    left: float
    top: float
    right: float
    bottom: float


def center_box(width: int, height: int, settings: ImageSettings) -> Box:
    """What "resize the shorter side to shorter_side, cut out the middle" takes, in the original's pixels."""
    side = min(width, height) * settings.image_size / settings.shorter_side
    left, top = (width - side) / 2, (height - side) / 2
    return Box(left, top, left + side, top + side)


def random_box(width: int, height: int, settings: ImageSettings, draws: Sequence[float]) -> Box:
    """A part of random area (min_area to 1) and aspect ratio (3/4 to 4/3) at a random place.

    After ten tries that do not fit: the largest central part with an aspect ratio in the range.
    Source: the random resized crop of Szegedy et al. 2015, as in current image trainers.
    """
    for attempt in range(_CROP_TRIES):
        area = width * height * (settings.min_area + (1 - settings.min_area) * draws[2 * attempt])
        ratio = math.exp(math.log(4 / 3) * (2 * draws[2 * attempt + 1] - 1))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = math.floor(draws[2 * _CROP_TRIES] * (width - wide + 1))
            top = math.floor(draws[2 * _CROP_TRIES + 1] * (height - high + 1))
            return Box(left, top, left + wide, top + high)
    wide, high = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - wide) // 2, (height - high) // 2
    return Box(left, top, left + wide, top + high)


class Look(NamedTuple):
    """The random changes of an image other than the box."""

    flip: bool
    brightness: float
    contrast: float
    saturation: float


def random_look(settings: ImageSettings, draws: Sequence[float]) -> Look:
    """Whether to mirror, and the colour factors of crop_flip_color."""
    flip, *colors = draws[2 * _CROP_TRIES + 2 : DRAWS_PER_IMAGE]
    factors = (1 + settings.color_jitter * (2 * color - 1) for color in colors)
    return Look(flip < 0.5, *factors)
