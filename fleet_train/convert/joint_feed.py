"""What the ranks were fed, as one feed of their joint batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from fleet_train.errors import ConversionError

Array = NDArray[Any]
Shapes = Mapping[str, Sequence[int]]


def read_feed(feed: Any, wanted: Iterable[str]) -> dict[str, Array]:
    """Arrays of what a run is fed, of those ``wanted`` by name. Raises ConversionError if it has others."""
    given = feed[0] if isinstance(feed, (list, tuple)) and len(feed) == 1 else feed or {}
    if not isinstance(given, Mapping):
        raise ConversionError(f"the feed is a {type(given).__name__}, and no dict of arrays")
    arrays = {}
    for name in wanted:
        value = given.get(name)
        if isinstance(value, paddle.base.core.DenseTensor) and value.lod():
            raise ConversionError(f"'{name}' is fed with levels of detail (LoD)")
        arrays[name] = value.numpy() if isinstance(value, paddle.Tensor) else np.asarray(value)
        if arrays[name].dtype == np.object_:
            raise ConversionError(f"'{name}' is fed with nothing, or with arrays of unlike shapes")
    return arrays


class JointFeed:
    """The feed that joins ``parts``, of each rank, for inputs of these ``shapes``.

    Samples are joined along the unknown dimension; in a program with none, along the first. What is not per sample is
    that of all ranks if they have the same. Numbers in which they differ are counts of the ranks' own samples, and
    added up. Raises ConversionError for others. ``drawn``: how the names of random values begin.
    """

    def __init__(self, shapes: Shapes, parts: Sequence[Mapping[str, Array]], drawn: str) -> None:
        self._shapes, self._parts, self._drawn = shapes, parts, drawn
        self._is_fixed = not any(size < 0 for shape in shapes.values() for size in shape)
        self.counts = self._count()
        """How many samples each rank was fed."""
        self.added: list[str] = []
        """The names of the numbers that are added up."""
        self.odd: list[str] = []
        """The names of inputs that are joined, and have another number of rows than there are samples."""
        self.arrays = {name: self._joined(name) for name in shapes}

    def _sizes(self, name: str, axis: int) -> tuple[int, ...]:
        return tuple(part[name].shape[axis] for part in self._parts)

    def _axes(self, name: str) -> list[int]:
        """The dimensions of an input along which it may have samples."""
        shape = self._shapes[name]
        return [0] * bool(shape) if self._is_fixed else [axis for axis, size in enumerate(shape) if size < 0]

    def _count(self) -> tuple[int, ...]:
        """The number of samples: most inputs tell it that have one such dimension, else the first of the others."""
        fed = [name for name, shape in self._shapes.items() if list(shape) != [1] and not name.startswith(self._drawn)]
        axes = {name: self._axes(name) for name in fed if self._axes(name)}
        clear = [name for name in axes if len(axes[name]) == 1] or axes
        told = Counter(self._sizes(name, axes[name][0]) for name in clear)
        return max(told, key=lambda sizes: (told[sizes], sum(sizes)), default=(0,) * len(self._parts))

    def _joined(self, name: str) -> Array:
        parts, axes, is_drawn = [part[name] for part in self._parts], self._axes(name), name.startswith(self._drawn)
        shown = "a value drawn at random" if is_drawn else f"'{name}'"
        are_equal = all(np.array_equal(part, parts[0]) for part in parts)
        may_be_joined = axes and not (self._is_fixed and self._shapes[name][0] % max(1, self.counts[0]))
        axis = next((axis for axis in axes if self._sizes(name, axis) == self.counts), None)
        if axis is None and may_be_joined and (is_drawn or not are_equal):
            axis = axes[0]
            self.odd += [] if is_drawn else [name]
        if axis is None and are_equal:
            return parts[0]
        if axis is None and not is_drawn and parts[0].size == 1:
            self.added.append(name)
            return np.sum(np.stack(parts), axis=0, dtype=parts[0].dtype)
        if axis is None:
            shape = list(self._shapes[name])
            raise ConversionError(f"{shown} is not per sample (its shape is {shape}), and is unlike on the ranks")
        if len({part.shape[:axis] + part.shape[axis + 1 :] for part in parts}) > 1:
            shapes = " and ".join(str(list(each)) for each in sorted({part.shape for part in parts}))
            raise ConversionError(f"{shown} has shapes that cannot be joined: {shapes}; pad them alike on all ranks")
        return np.concatenate(parts, axis)
