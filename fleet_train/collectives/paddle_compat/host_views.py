"""Tensors in host memory as numpy arrays over the same memory, a few times faster than DLPack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.paddle_compat.casting import as_dtype
from fleet_train.errors import ConversionError

Array = np.ndarray[Any, Any]

_TYPES = {paddle.float32: "<f4", paddle.uint8: "|u1", paddle.bfloat16: "<u2"}


class _Memory:
    """Gives numpy the address; the array keeps this object, and with it the tensor."""

    def __init__(self, tensor: Any, elements: int, kind: str) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": (elements,),
            "typestr": kind,
        }


def host_view(tensor: Any) -> Array:
    """``tensor`` ([...], float32, uint8 or bfloat16, contiguous, on the CPU) as an array [elements] over its memory;
    bfloat16 as its bits in uint16.

    A write to one is read from the other. The array keeps the tensor alive; it must not be used after the tensor got
    other memory (``set_value`` with another shape). Raises ConversionError for other tensors.
    """
    kind = _TYPES.get(tensor.dtype)
    if kind is None or not tensor.is_contiguous() or not tensor.place.is_cpu_place():
        raise ConversionError(
            f"host_view was given a tensor of {tensor.dtype} on {tensor.place}, strides {tensor.strides}; it takes "
            "contiguous float32, uint8 or bfloat16 on the CPU: cast it, or use its contiguous()"
        )
    elements = math.prod(tensor.shape)
    return np.asarray(_Memory(tensor, elements, kind)) if elements else np.empty(0, kind)


def add_in_place(total: Any, tensors: Sequence[Any]) -> Any:
    """``total`` ([elements], float32) plus ``tensors`` (of any float dtype), concatenated from its start."""
    buffer, start = host_view(total), 0
    for tensor in tensors:
        values = host_view(as_dtype(tensor, "float32").contiguous())
        part = buffer[start : start + values.size]
        np.add(part, values, out=part)
        start += values.size
    return total
