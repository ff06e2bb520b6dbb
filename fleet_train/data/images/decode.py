"""Decodes one image file into one array. Imports only Pillow and numpy: worker processes start with this module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fleet_train.data.core.rng import Draws
from fleet_train.data.images.geometry import DRAWS_PER_IMAGE, Box, ImageSettings, center_box, random_box, random_look
from fleet_train.errors import FleetTrainError
from fleet_train.files import open_regular

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Whatever a file's name is. Pillow knows more: for PostScript it starts a program."""
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
        look = random_look(self._settings, draws)
        colored: NDArray[Any] = pixels
        if self._augment == "crop_flip_color":
            colored = change_colors(pixels.astype(np.float32), look.brightness, look.contrast, look.saturation)
        if self._augment != "none" and look.flip:
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
