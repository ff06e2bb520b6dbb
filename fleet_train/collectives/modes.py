"""Paddle's two modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import paddle


@contextlib.contextmanager
def dynamic_mode() -> Iterator[None]:
    """Dynamic mode for the body, whatever the caller is in: process groups can be made there only."""
    was_dynamic = paddle.in_dynamic_mode()
    if not was_dynamic:
        paddle.disable_static()
    try:
        yield
    finally:
        if not was_dynamic:
            paddle.enable_static()
