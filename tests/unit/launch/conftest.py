from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fleet_train.cluster.store.reports import FailureReport
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


def aside(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begins the call in a thread; what is returned waits for its result, or for the error that it raised."""
    results: list[Any] = []

    def one() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=one)
    thread.start()

    def result() -> Any:
        thread.join(timeout=60)
        return results[0]

    return result


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls side by side; each one's result, or the error that it raised."""
    return [result() for result in [aside(call) for call in calls]]


def own(rank: int, seconds: float, what: str = "ValueError", code: int = 1) -> FailureReport:
    """What a rank reports of itself."""
    return FailureReport(rank, rank, "raised", what, "rank ...", code, (), seconds)


def missed(rank: int, seconds: float, kind: str = "missing", what: str = "did not arrive") -> FailureReport:
    """What rank 0 reports of another."""
    return FailureReport(rank, 0, kind, what, "rank ...", 11, (), seconds)
