"""An event loop whose clock jumps to the next timer: timeouts of seconds pass at once, on any machine."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Does not wait; it tells how long it was to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        assert found or timeout is not None, "nothing is due, and nobody will ever come"
        if not found:
            self.seconds += timeout or 0.0
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.seconds


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An asynchronous test as a plain one, in a loop of its own whose clock begins at 1000 s."""

    @functools.wraps(test)
    def plain(*args: Any, **options: Any) -> None:
        loop = _Loop()
        try:
            loop.run_until_complete(asyncio.wait_for(test(*args, **options), 10_000))
        finally:
            loop.close()

    return plain
