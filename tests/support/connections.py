"""The other end of a connection of the rendezvous store, without a socket."""

from __future__ import annotations

import asyncio
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
