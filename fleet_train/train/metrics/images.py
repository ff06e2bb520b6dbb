"""Images of an evaluation, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_train.train.components.mistakes import Mistake

_SIDE_PIXELS = 640
_MARGIN = 56
_MOST_CLASSES_WITH_NUMBERS = 20
_TILE, _GAP = 112, 8
_HIT, _MISS = (36, 105, 189), (201, 68, 44)


def confusion_picture(confusion: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Counts [classes, classes] (row: true class, column: predicted) as a picture, uint8 [height, width, 3].

    A stronger colour means a larger share of the row: blue on the diagonal, red elsewhere. Up to 20 classes have
    their counts in the cells.
    """
    from PIL import Image, ImageDraw, ImageFont

    classes = len(confusion)
    cell = max(1, _SIDE_PIXELS // classes)
    side = cell * classes
    picture = Image.new("RGB", (side + _MARGIN + 16, side + _MARGIN + 16), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    for row, column in np.ndindex(classes, classes):
        left, top = _MARGIN + column * cell, _MARGIN + row * cell
        colour = _blend(_HIT if row == column else _MISS, float(shares[row, column]), row == column)
        draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill=colour)
        if classes <= _MOST_CLASSES_WITH_NUMBERS and confusion[row, column]:
            ink = "white" if row == column and shares[row, column] > 0.5 else "black"
            centre = (left + cell / 2, top + cell / 2)
            draw.text(centre, str(confusion[row, column]), fill=ink, font=font, anchor="mm")
    _label_axes(draw, font, classes, cell)
    return np.asarray(picture)


def _blend(colour: tuple[int, int, int], share: float, is_hit: bool) -> tuple[int, int, int]:
    # One miss must be visible next to ninety-nine hits.
    weight = share if is_hit else share**0.5
    red, green, blue = (round(244 + (channel - 244) * weight) for channel in colour)
    return red, green, blue


def _label_axes(draw: Any, font: Any, classes: int, cell: int) -> None:
    side, step = cell * classes, max(1, -(-classes // _MOST_CLASSES_WITH_NUMBERS))
    draw.text((_MARGIN + side / 2, 14), "predicted class", fill="black", font=font, anchor="mm")
    draw.text((6, 40), "true", fill="black", font=font, anchor="lm")
    for index in range(0, classes, step):
        middle = _MARGIN + index * cell + cell / 2
        draw.text((middle, 40), str(index), fill="black", font=font, anchor="mm")
        draw.text((_MARGIN - 12, middle), str(index), fill="black", font=font, anchor="rm")


def mistakes_picture(mistakes: Sequence[Mistake], columns: int = 6) -> NDArray[np.uint8]:
    """Images in rows, below each its true and its predicted class: uint8 [height, width, 3].

    Each image is stretched from its darkest to its lightest value: the network's normalisation is not undone.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows = -(-len(mistakes) // columns)
    width, height = _TILE + 2 * _GAP, _TILE + 3 * _GAP + 14
    picture = Image.new("RGB", (columns * width, rows * height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    for index, mistake in enumerate(mistakes):
        left, top = index % columns * width + _GAP, index // columns * height + _GAP
        low, span = mistake.image.min(), max(float(np.ptp(mistake.image)), 1e-9)
        levels = ((mistake.image - low) / span * 255).astype(np.uint8).transpose(1, 2, 0)
        tile = Image.fromarray(np.broadcast_to(levels, (*levels.shape[:2], 3)).copy())
        picture.paste(tile.resize((_TILE, _TILE), Image.Resampling.NEAREST), (left, top))
        caption = f"{mistake.true_class}, not {mistake.predicted_class} ({mistake.confidence:.2f})"
        draw.text((left + _TILE / 2, top + _TILE + _GAP), caption, fill="black", font=font, anchor="mt")
    return np.asarray(picture)
