from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from fleet_train.log import logger


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """The package's messages of this test, without the beginning ``fleet_train:``."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)
