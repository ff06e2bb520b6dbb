"""The other end of a connection of the rendezvous store, without a socket, servers to say it to, and an event loop
whose clock jumps to the next timer: timeouts of seconds pass at once, on any machine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.namespace import Reply, Root, StoreNamespace
from fleet_train.cluster.store.relay import Parent, Relay
from fleet_train.cluster.store.server import StoreServer, StoreSession
from fleet_train.cluster.store.wire import Arrival, Decoder, Fields, Key, encode, pack, pack_times, parse

WELCOME = {"welcome": True, "proof": ""}
BARRIER = ["rank", "barrier", "step 1"]
R = TypeVar("R", bound=StoreNamespace)


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


def hall_here(**options: Any) -> StoreServer:
    """A server on this loop, without a port."""
    state = StoreServer("10.0.0.1", 0, **options)
    state._begin()
    if options.get("begins_namespaces", True):
        state.root("0")
    return state


class Caller:
    """Whoever has connected: it says frames, and keeps what it hears."""

    def __init__(self, state: StoreServer, address: str = "10.0.0.9") -> None:
        self.transport = Transport(address)
        self.session = StoreSession(state)
        self._state = state
        self.session.connection_made(self.transport)

    def write(self, data: bytes) -> None:
        self.session.data_received(data)

    def say(self, header: dict[str, Any], body: bytes = b"") -> list[dict[str, Any]]:
        """The headers of what it is answered at once."""
        self.transport.sent.take()
        self.write(encode(header, body))
        return self.transport.sent.headers

    def hello(self, **fields: Any) -> list[dict[str, Any]]:
        told = {"do": "hello", "job": "", "nonce": "n", "namespace": "0", "group": "rank", "member": 0, "watched": True}
        return self.say(told | fields)

    def lose(self) -> None:
        self.session.connection_lost(None)

    @property
    def is_ended(self) -> bool:
        return self.transport.is_closing()


def member(state: StoreServer, number: int, **fields: Any) -> Caller:
    caller = Caller(state)
    assert caller.hello(member=number, **fields) == [WELCOME]
    return caller


class Waiting(Relay):
    """A relay whose parent answers nothing; ``asked``: what waits for it."""

    def __init__(self, state: StoreServer) -> None:
        super().__init__(state.clock, Parent("10.0.0.1", 6170, "0", 1, "node 1", 0b11, Access()))
        self.asked: list[tuple[dict[str, Any], Reply]] = []
        state.namespaces["0"] = self

    def ask(self, request: dict[str, Any], body: bytes, reply: Reply) -> None:  # noqa: ARG002
        self.asked.append((request, reply))


def gone(state: StoreServer, group: str = "rank") -> Any:
    answers: list[bytes] = []
    state.namespaces["0"].ask({"do": "gone", "group": group}, b"", lambda _, body: answers.append(bytes(body)))
    return json.loads(answers[0])


def ticking(found: R) -> R:
    """A namespace whose server's clock ticks."""

    def tick() -> None:
        loop.call_later(0.05, tick)
        found.tick(loop.time())

    loop = asyncio.get_running_loop()
    loop.call_later(0.05, tick)
    return found


def root_here() -> Root:
    return ticking(Root(asyncio.get_running_loop().time))


def arrive(
    at: StoreNamespace,
    who: Heard,
    member: int,
    count: int,
    *,
    name: str = "step 1",
    kind: str = "barrier",
    group: str = "rank",
    timeout: float = 60.0,
    call: str = "",
    body: bytes = b"",
    told: list[float] | None = None,
) -> None:
    mask = 1 << member
    body = pack({body: mask}) if body else pack_times(member, told) if told else b""
    calls = {call: mask} if call else {}
    at.arrive(Arrival(Key(group, kind, name), who, mask, count, timeout, calls, Fields({"slowest": 1.0}), body))


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
