"""Small image folders for tests: classes of different colours, so that a network can learn them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, width: int = 48, height: int = 36, color: tuple[int, int, int] = (90, 120, 40)) -> None:
    """A JPEG (or what the suffix says): the colour with a gradient from left to right and one from top to bottom."""
    columns, rows = np.meshgrid(np.linspace(-60, 60, width), np.linspace(-60, 60, height))
    pixels = np.array(color, np.float64) + np.stack([columns, rows, (columns + rows) / 2], axis=-1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=95)


def write_image_folder(root: Path, per_class: int = 6, classes: int = 2, val_per_class: int = 2) -> Path:
    """`train/` and `val/` with that many images per class; class 0 is red, class 1 green, class 2 blue."""
    generator = np.random.default_rng(0)
    base = [(200, 60, 60), (60, 200, 60), (60, 60, 200), (200, 200, 60), (60, 200, 200)]
    for part, count in (("train", per_class), ("val", val_per_class)):
        for label in range(classes):
            for number in range(count):
                color = tuple(int(value) for value in np.array(base[label]) + generator.integers(-30, 30, 3))
                size = (int(generator.integers(40, 64)), int(generator.integers(40, 64)))
                write_image(root / part / f"class{label}" / f"{number}.jpg", *size, color=color)  # type: ignore[arg-type]
    return root
