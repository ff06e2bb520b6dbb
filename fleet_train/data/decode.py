"""Decodes one image file into one array. Imports only Pillow and numpy: worker processes start with this module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fleet_train.data.datasets import Draws
from fleet_train.errors import DataError, FleetTrainError
from fleet_train.files import open_regular

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""The formats that are read, whatever a file's name is. Pillow knows more: for PostScript it starts a program."""
Pixels = NDArray[np.float32]
_GRAY = np.array([0.299, 0.587, 0.114], dtype=np.float32)


class UnreadableImage(FleetTrainError):
    """The file is missing, truncated or not an image; the message is the reason without the name."""


@contextmanager
def opened(path: str) -> Iterator[Image.Image]:
    """The image in a regular file, to be decoded in the `with` statement, which may raise any exception of a decoder:
    all become UnreadableImage. A pipe or device is never waited for."""
    name = repr(path)
    try:
        with open_regular(path) as file:
            name = repr(file)
            with Image.open(file, formats=FORMATS) as image:
                yield image
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise nearly any exception on broken input
        raise UnreadableImage(f"{type(error).__name__}: {error}".replace(name, "it")) from error


class ImageDecoder:
    """Decodes images for training (`crop_flip`, `crop_flip_color`) or for evaluation (`none`)."""

    def __init__(self, settings: ImageSettings, augment: str, seed: int) -> None:
        self._settings = settings
        self._augment = augment
        self._seed = seed
        mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (settings.mean, settings.std))
        self._scale = 1 / (255 * std)
        self._offset = -mean / std

    def decode(self, path: str, index: int, epoch: int, out: Pixels) -> None:
        """Write the image into `out`, float32 [3, size, size]; UnreadableImage leaves `out` undefined."""
        draws = Draws(self._seed, epoch, np.array([index])).uniform(DRAWS_PER_IMAGE)[0].tolist()
        self._finish(self._read(path, draws), draws, out)

    def _read(self, path: str, draws: list[float]) -> NDArray[np.uint8]:
        """The requested part in the requested size, uint8 [size, size, 3]."""
        size = self._settings.image_size
        with opened(path) as image:
            width, height = image.size
            box = center_box(width, height, self._settings)
            if self._augment != "none":
                box = random_box(width, height, self._settings, draws)
            # A JPEG can be decoded at 1/2, 1/4 or 1/8 in a fraction of the time, if that is still large enough.
            shrink = max(size / (box.right - box.left), size / (box.bottom - box.top))
            image.draft("RGB", (math.ceil(width * shrink), math.ceil(height * shrink)))
            scale_x, scale_y = image.size[0] / width, image.size[1] / height
            part = Box(box.left * scale_x, box.top * scale_y, box.right * scale_x, box.bottom * scale_y)
            colored = image if image.mode == "RGB" else image.convert("RGB")
            return np.asarray(colored.resize((size, size), Image.Resampling.BILINEAR, box=part))

    def _finish(self, pixels: NDArray[np.uint8], draws: list[float], out: Pixels) -> None:
        changes = random_changes(self._settings, draws)
        colored: NDArray[Any] = pixels
        if self._augment == "crop_flip_color":
            colored = change_colors(pixels.astype(np.float32), changes.brightness, changes.contrast, changes.saturation)
        if self._augment != "none" and changes.flip:
            colored = colored[:, ::-1]
        np.multiply(colored.transpose(2, 0, 1), self._scale, out=out)
        out += self._offset


def change_colors(pixels: Pixels, brightness: float, contrast: float, saturation: float) -> Pixels:
    """Brightness, then contrast around the mean grey, then saturation around each pixel's grey; clipped to 0..255."""
    bright = np.clip(pixels * np.float32(brightness), 0, 255)
    middle = np.float32((bright @ _GRAY).mean())
    contrasted = np.clip(middle + np.float32(contrast) * (bright - middle), 0, 255)
    gray = (contrasted @ _GRAY)[:, :, None]
    result: Pixels = np.clip(gray + np.float32(saturation) * (contrasted - gray), 0, 255)
    return result


# The size and the part of an image that are used: sizes, boxes and factors, pure arithmetic.


IMAGE_AUGMENTATIONS = ("none", "crop_flip", "crop_flip_color")
_CROP_TRIES = 10
DRAWS_PER_IMAGE = 2 * _CROP_TRIES + 6
"""Random numbers per image: area and aspect ratio of each try, place (2), flip, three colour factors."""


@dataclass(frozen=True)
class ImageSettings:
    """Images become float32 [3, image_size, image_size], (value / 255 - mean) / std per channel (RGB)."""

    image_size: int = 224
    resize_size: int | None = None
    """Pixels of the shorter side, in evaluation, before the middle is cut out. None = image_size * 256 / 224."""
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


class ImageChanges(NamedTuple):
    """The random changes of an image other than the box."""

    flip: bool
    brightness: float
    contrast: float
    saturation: float


def random_changes(settings: ImageSettings, draws: Sequence[float]) -> ImageChanges:
    """Whether to mirror, and the colour factors of crop_flip_color."""
    flip, *colors = draws[2 * _CROP_TRIES + 2 : DRAWS_PER_IMAGE]
    factors = (1 + settings.color_jitter * (2 * color - 1) for color in colors)
    return ImageChanges(flip < 0.5, *factors)
