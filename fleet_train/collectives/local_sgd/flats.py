"""Tensors of several dtypes as flat buffers: one for each dtype in which means are computed.

Means of float64 are computed in float64, all others in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fleet_train.collectives.methods.base import flatten, views
from fleet_train.collectives.paddle_compat.casting import as_dtype
from fleet_train.plan.plan import by_mean_dtype, mean_dtype


def flats(tensors: Sequence[Any]) -> list[Any]:
    """Copies of eager tensors, one flat buffer for each dtype in which a mean is computed, in the order of
    ``MEAN_DTYPES``."""
    groups = _groups(tensors)
    return [flatten([as_dtype(tensors[index], name) for index in groups[name]]) for name in groups]


def cut(buffers: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Views of the values of ``flats(tensors)``, in the order and shapes of ``tensors``."""
    parts: list[Any] = [None] * len(tensors)
    for buffer, indices in zip(buffers, _groups(tensors).values(), strict=True):
        for index, part in zip(indices, views(buffer, [tensors[index].shape for index in indices]), strict=True):
            parts[index] = part
    return parts


def write(tensors: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Put flat values into tensors, in place: the scope's variables share their memory."""
    for tensor, part in zip(tensors, cut(buffers, tensors), strict=True):
        paddle.assign(part if part.dtype == tensor.dtype else part.cast(tensor.dtype), output=tensor)


def add(tensors: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Add flat values to tensors, in place."""
    for tensor, part in zip(tensors, cut(buffers, tensors), strict=True):
        total = as_dtype(tensor, mean_dtype(_dtype_of(tensor))) + part
        paddle.assign(total if total.dtype == tensor.dtype else total.cast(tensor.dtype), output=tensor)


def _groups(tensors: Sequence[Any]) -> dict[str, list[int]]:
    return by_mean_dtype([_dtype_of(tensor) for tensor in tensors])


def _dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]
