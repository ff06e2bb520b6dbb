"""The other end of a connection of the rendezvous store, without a socket, and an event loop whose clock jumps to the
next timer: timeouts of seconds pass at once, on any machine.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

from fleet_train.cluster.store.wire import Arrival, Decoder, Fields, Key, parse


class Heard:
    """Whoever waits at a barrier, or a relay's link: the frames that it was sent."""

    def __init__(self) -> None:
        self.frames: list[tuple[dict[str, Any], bytes]] = []

    def send(self, frame: bytes) -> None:
        self.frames += [(parse(head), bytes(body)) for head, body in Decoder().feed(frame)]

    def take(self) -> list[tuple[dict[str, Any], bytes]]:
        frames, self.frames = self.frames, []
        return frames

    @property
    def headers(self) -> list[dict[str, Any]]:
        return [header for header, _ in self.frames]


def arrival(mask: int, count: int, header: dict[str, Any], body: bytes = b"") -> Arrival:
    """Members at a barrier, with their contribution."""
    return Arrival(Key("rank", "barrier", "a"), Heard(), mask, count, 60.0, {}, Fields(header), body)


class Transport(asyncio.Transport):
    """What was written to a connection, and how it was closed; ``connection_lost`` is for the test to call."""

    def __init__(self, address: str = "10.0.0.9") -> None:
        super().__init__()
        self.sent = Heard()
        self.options: list[tuple[Any, ...]] = []
        self.ends: list[str] = []
        self._address = address

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self, "peername": (self._address, 40000)}.get(name, default)

    def setsockopt(self, *option: Any) -> None:
        self.options.append(option)

    def write(self, data: Any) -> None:
        self.sent.send(bytes(data))

    def write_eof(self) -> None:
        self.ends.append("eof")

    def pause_reading(self) -> None:
        self.ends.append("paused")

    def resume_reading(self) -> None:
        self.ends.append("resumed")

    def is_closing(self) -> bool:
        return bool({"closed", "aborted"} & set(self.ends))

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("aborted")


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
