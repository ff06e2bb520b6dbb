"""A program's argument: its inputs and layers, in the dtype, and with the layers, that a profile wants. Imports Paddle,
not fleet_train.

The inputs are made where they are asked for; the same name is the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from tests.joint_batch.batches import Array, Draw, Input, Number, Samples

FEATURES = 8
_WORDS = 12


class Builder:
    """``batch``: the first dimension of inputs, None unless it is known; ``ranks``: ``fleet.worker_num()``."""

    def __init__(self, dtype: str, batch: int | None, ranks: int, synchronized: bool = False) -> None:
        self.dtype, self.batch, self.ranks, self._synchronized = dtype, batch, ranks, synchronized
        self.inputs: dict[str, Input | Number] = {}
        self._values: dict[str, Any] = {}

    def data(
        self, name: str, shape: Sequence[int | None], dtype: str, draw: Draw, counts: bool = True, length: str = ""
    ) -> Any:
        """An input of samples; ``shape`` without the batch."""
        return self._input(name, [self.batch, *shape], Input(dtype, draw, counts, length))

    def number(self, name: str, of: Callable[[dict[str, Array], dict[str, Array], int], Any]) -> Any:
        """An input of shape [1] that the script computes with all ranks."""
        return self._input(name, [1], Number(self.dtype, lambda *given: np.reshape(of(*given), [1])))

    def _input(self, name: str, shape: Sequence[int | None], one: Input | Number) -> Any:
        if name not in self._values:
            self.inputs[name] = one
            self._values[name] = paddle.static.data(name, list(shape), one.dtype)
        return self._values[name]

    # Inputs.

    def floats(self, *shape: int, name: str = "goal") -> Any:
        """Numbers that grow with a sample's place, so that the means of parts are unlike."""

        def draw(samples: Samples) -> Array:
            values = samples.random.standard_normal((samples.number, *shape))
            return values * (0.5 + 2 * samples.rising.reshape(-1, *[1] * len(shape)))

        return self.data(name, shape, self.dtype, draw, counts=False)

    def mask(self, *shape: int, name: str = "mask") -> Any:
        """1 where something is valid."""
        return self.data(name, shape or (1,), self.dtype, lambda samples: samples.valid(*(shape or (1,))))

    def weights(self, name: str = "weight") -> Any:
        """A positive weight of each sample; 0 where nothing is valid."""
        draw = lambda samples: samples.valid(1) * (0.5 + samples.random.random((samples.number, 1)))  # noqa: E731
        return self.data(name, (1,), self.dtype, draw)

    def labels(self, classes: int, *shape: int, ignore: int | None = None, name: str = "label") -> Any:
        """Classes, higher ones later in the batch; ``ignore`` where nothing is valid."""
        full = shape or (1,)

        def draw(samples: Samples) -> Array:
            chance = samples.rising.reshape(-1, *[1] * len(full)) ** 0.5
            found = (classes * chance * samples.random.random((samples.number, *full)) ** 0.7).astype("int64")
            return found if ignore is None else np.where(samples.valid(*full), found, ignore)

        return self.data(name, full, "int64", draw)

    def positives(self, *shape: int, name: str = "positive") -> Any:
        """0 or 1, as integers."""
        return self.data(name, shape or (1,), "int64", lambda samples: samples.valid(*(shape or (1,))))

    def lengths(self, longest: int, name: str = "length") -> Any:
        """How many of a sample's steps are valid."""
        return self.data(name, (), "int64", lambda samples: _lengths(samples, longest))

    def tokens(self, words: int, longest: int, name: str = "token", padded: bool = False) -> Any:
        """Words [batch, longest], or [batch, time] where each part is ``padded`` to its own longest sample."""
        if padded:
            self.lengths(longest)
        draw = lambda samples: samples.random.integers(0, words, (samples.number, longest))  # noqa: E731
        shape = [None] if padded else [longest]
        return self.data(name, shape, "int64", draw, counts=False, length="length" if padded else "")

    # Layers.

    def features(self, outputs: int = 1, scale: float = 1.0) -> Any:
        """[batch, outputs]: an embedding and three layers."""
        hidden = nn.Linear(FEATURES, FEATURES)(self.floats(FEATURES, name="x"))
        word = self.labels(_WORDS, name="word")
        hidden = F.tanh(hidden + nn.Embedding(_WORDS, FEATURES)(word).squeeze(1))
        if self._synchronized:
            hidden = nn.BatchNorm1D(FEATURES)(hidden)
        hidden = F.tanh(nn.Linear(FEATURES, FEATURES)(hidden))
        return nn.Linear(FEATURES, outputs)(hidden) * scale

    def squares(self) -> Any:
        """The squared error of each sample, [batch, 1]."""
        return (self.features(1) - self.floats(1)) ** 2

    def constant(self, values: Sequence[float]) -> Any:
        return paddle.to_tensor(np.array(values, self.dtype))


def _lengths(samples: Samples, longest: int) -> Array:
    found = 1 + (longest * samples.rising * samples.random.random(samples.number)).astype("int64")
    return np.where(samples.blank, 0, np.minimum(found, longest))
