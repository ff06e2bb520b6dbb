"""Traces are recorded in static mode."""

from __future__ import annotations

from collections.abc import Iterator

import paddle
import pytest


@pytest.fixture(autouse=True)
def static_mode() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()
