"""Inputs of a program as Paddle 1.8 declared and fed them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.errors import ConversionError


def data(
    name: str,
    shape: Sequence[int | None],
    append_batch_size: bool = True,
    dtype: str = "float32",
    lod_level: int = 0,
    type: Any = None,
    stop_gradient: bool = True,
) -> Any:
    """``fluid.layers.data``: a batch dimension is put in front, unless ``shape`` has an open dimension already.

    Sequences with levels of detail (``lod_level``) do not exist any more and are refused.
    """
    del type
    if lod_level:
        raise ConversionError(f"data({name!r}): lod_level={lod_level}: pad the sequences and feed their lengths")
    sizes = [-1 if size is None else int(size) for size in shape]
    if append_batch_size and all(size >= 0 for size in sizes):
        sizes = [-1, *sizes]
    value = paddle.static.data(name, sizes, dtype)
    value.stop_gradient = stop_gradient
    return value


class DataFeeder:
    """Turns lists of samples into the ``feed`` of ``Executor.run``: one tuple per sample, one entry per input."""

    def __init__(self, feed_list: Sequence[Any], place: Any = None, program: Any = None) -> None:
        del place, program
        if names := [value for value in feed_list if isinstance(value, str)]:
            raise ConversionError(f"DataFeeder: give the input variables instead of their names {names}")
        self._inputs = [(_name(value), _sizes(value), _dtype(value)) for value in feed_list]

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays by input name, in the input's dtype; flat samples take the input's shape."""
        columns: list[list[Any]] = [[] for _ in self._inputs]
        for sample in iterable:
            if len(sample) != len(columns):
                raise ConversionError(f"DataFeeder: a sample has {len(sample)} entries for {len(columns)} inputs")
            for column, entry in zip(columns, sample, strict=True):
                column.append(entry)
        fed = {}
        for (name, sizes, dtype), column in zip(self._inputs, columns, strict=True):
            samples = [_sample(entry, name, sizes[1:], dtype) for entry in column]
            if len({one.shape for one in samples}) > 1:
                raise ConversionError(f"DataFeeder: samples of {name!r} differ in shape; pad them to one shape")
            fed[name] = np.stack(samples)
        return fed


def _sample(entry: Any, name: str, sizes: Sequence[int], dtype: str) -> np.ndarray[Any, Any]:
    sample = np.asarray(entry, dtype)
    if any(size < 0 for size in sizes):
        return sample
    if sample.size != math.prod(sizes):
        raise ConversionError(f"DataFeeder: a sample of {name!r} has {sample.size} values, its shape is {list(sizes)}")
    return sample.reshape(sizes)


def _name(value: Any) -> str:
    return str(value.name)


def _sizes(value: Any) -> list[int]:
    return [int(size) for size in value.shape]


def _dtype(value: Any) -> str:
    return str(value.dtype).rpartition(".")[2].lower()
