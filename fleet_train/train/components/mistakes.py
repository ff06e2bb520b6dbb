"""The images that an evaluation misclassified with the most confidence: they show wrong labels and hard classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 24


@dataclass(frozen=True)
class Mistake:
    image: NDArray[np.float32]
    """[channels, height, width], the network's input."""
    true_class: int
    predicted_class: int
    confidence: float
    """The probability of the predicted class."""


def worst(mistakes: Sequence[Mistake], feed: Mapping[str, Any], probabilities: NDArray[np.float32]) -> list[Mistake]:
    """At most 24 of `mistakes` and those of one more batch, the most confident first.

    `feed`: `features` [batch, channels, height, width], `labels` [batch]; `probabilities`: [batch, classes]. Features
    that are not images (another number of dimensions, or neither 1 nor 3 channels) give none.
    """
    images, labels = np.asarray(feed["features"]), np.asarray(feed["labels"]).reshape(-1)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        return []
    predicted = probabilities.argmax(axis=1)
    found = [
        Mistake(images[index].copy(), int(labels[index]), int(predicted[index]), float(probabilities[index].max()))
        for index in np.flatnonzero(predicted != labels)
    ]
    return sorted([*mistakes, *found], key=lambda mistake: -mistake.confidence)[:MOST]
