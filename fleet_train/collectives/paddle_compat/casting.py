"""Dtypes of eager tensors."""

from __future__ import annotations

from typing import Any

import paddle


def as_dtype(tensor: Any, dtype: str) -> Any:
    """``tensor`` in ``dtype`` (by name); itself if it has that dtype already, in which case Paddle's own ``cast``
    copies."""
    return tensor if tensor.dtype == getattr(paddle, dtype) else tensor.cast(dtype)
