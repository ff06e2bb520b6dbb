"""A job of one process, in static mode, for tests of what the trainer puts into programs."""

from __future__ import annotations

from collections.abc import Iterator

import paddle
import pytest

from fleet_train import fleet


@pytest.fixture
def one_process() -> Iterator[None]:
    paddle.enable_static()
    fleet.init()
    yield
    fleet.shutdown()
    paddle.disable_static()
