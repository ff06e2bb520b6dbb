"""The most confident mistakes of several batches, and their picture."""

from __future__ import annotations

import numpy as np

from fleet_train.train.evaluation import MOST, Mistake, worst
from fleet_train.train.reporter import mistakes_picture


def batch(labels: list[int]) -> dict[str, np.ndarray]:
    images = np.arange(len(labels), dtype=np.float32).reshape(-1, 1, 1, 1) * np.ones((1, 1, 4, 4), np.float32)
    return {"features": images, "labels": np.array(labels, np.int64)}


def test_only_wrong_ones_are_kept_the_most_confident_first() -> None:
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]], np.float32)
    first = worst([], batch([0, 1, 1, 1]), probabilities)
    assert [(m.true_class, m.predicted_class, round(m.confidence, 2), m.image[0, 0, 0]) for m in first] == [
        (1, 0, 0.7, 3.0),
        (1, 0, 0.6, 1.0),
    ]
    both = worst(first, batch([1]), np.array([[0.65, 0.35]], np.float32))
    assert [round(mistake.confidence, 2) for mistake in both] == [0.7, 0.65, 0.6]


def test_there_are_24_at_most() -> None:
    wrong = np.tile(np.array([[1.0, 0.0]], np.float32), (100, 1))
    assert len(worst([], batch([1] * 100), wrong)) == MOST == 24


def test_what_is_no_image_is_left_out() -> None:
    feed = {"features": np.zeros((1, 8), np.float32), "labels": np.array([1])}
    assert worst([], feed, np.array([[1.0, 0.0]], np.float32)) == []


def test_picture_has_a_tile_for_each_mistake() -> None:
    gray = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 8, 8)
    colour = np.stack([np.ones((8, 8)), np.zeros((8, 8)), np.zeros((8, 8))]).astype(np.float32)
    mistakes = [Mistake(gray, 3, 8, 0.9)] * 6 + [Mistake(colour, 1, 2, 0.5)]
    picture = mistakes_picture(mistakes)
    assert picture.shape == (2 * 150, 6 * 128, 3)
    assert picture[10, 10].tolist() == [0, 0, 0]  # the darkest corner of the first tile, the lightest is opposite
    assert picture[118, 118].tolist() == [255, 255, 255]
    assert picture[160, 20].tolist() == [255, 0, 0]
    assert (picture[200, 300] == 255).all(), "no tile there"
