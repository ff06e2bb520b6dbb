"""A relay: the server of one node in a job of many, between its members and its parent.

It waits until all members below it have arrived at a barrier, sends its parent one reduction, and forwards the answer
unchanged. If members are late, it soon reports those that have arrived, so that the root can name the others. All
other requests are forwarded to the parent. A relay that loses its parent reports that to all that wait.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from fleet_train import timeouts
from fleet_train.cluster.store.access import Access, Refused
from fleet_train.cluster.store.client import dial
from fleet_train.cluster.store.namespace import Barrier, Reply, StoreNamespace
from fleet_train.cluster.store.wire import (
    KINDS,
    LENGTHS,
    MOST_BODY_BYTES,
    Arrival,
    Body,
    Decoder,
    Header,
    Key,
    ProtocolError,
    StoreParticipant,
    all_members,
    encode,
    keep_alive,
    parse,
    to_ranges,
)
from fleet_train.errors import ClusterError

_RELAY_PARTIAL_SECONDS = 1.0
"""How long members may be late before a relay's parent gets a list of those that have arrived."""
_RELAY_UPDATE_SECONDS = 0.1
"""How long a relay collects further arrivals after that list, before it sends them to its parent as well."""
_RELAY_GRACE_SECONDS = 2.0
"""How much longer than a waiter's timeout a relay waits for its parent to name the missing members."""

_BEATS_PER_SILENCE = 4


@dataclass(frozen=True)
class Parent:
    """The server above a relay: its address, and which members the relay serves."""

    host: str
    port: int
    namespace: str
    number: int
    """The relay's own number among relays (its node's), for messages."""
    machine: str
    below: int
    """The ranks of the relay's whole subtree: the members of groups whose numbers are ranks."""
    access: Access
    silence_seconds: float = 20.0

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def dial(self, timeout_seconds: float) -> socket.socket:
        """Connect to the parent. Raises ClusterError if it does not accept this relay in that time."""
        identity = {"role": "relay", "namespace": self.namespace, "group": "relay", "member": self.number}
        identity |= {"machine": self.machine, "silence": self.silence_seconds}
        try:
            return dial(self.endpoint, self.access, identity, timeout_seconds, timeouts.STORE_DIAL_SECONDS)
        except (OSError, Refused) as error:
            raise ClusterError(f"the relay cannot reach its parent at {self.endpoint}: {error}") from None


class Relay(StoreNamespace):
    """A node's part of a namespace whose root is elsewhere."""

    def __init__(self, clock: Callable[[], float], parent: Parent) -> None:
        super().__init__(clock, grace_seconds=_RELAY_GRACE_SECONDS)
        self.parent = parent
        self.link = RelayLink(self)
        self._asked: dict[int, Reply] = {}
        self._number = 0
        self._lost = ""

    def parent_lost(self, why: str) -> None:
        """Report the loss of the parent to all that wait, or ask from now on."""
        self._lost = self._lost or f"{self.parent.endpoint}, the parent of this node's relay: {why}"
        for barrier in list(self.pending.values()):
            self._finish(barrier, barrier.frame({"error": "store", "why": self._lost}))
        asked, self._asked = self._asked, {}
        for reply in asked.values():
            reply({"error": "store", "why": self._lost}, b"")

    # from members and from relays below

    def _arrived(self, barrier: Barrier, arrival: Arrival) -> None:
        expected = self.parent.below & all_members(barrier.count)
        if self._lost:
            self._finish(barrier, barrier.frame({"error": "store", "why": self._lost}))
        elif barrier.count != arrival.count or not expected & ~barrier.arrived:
            self._report(barrier, arrival.count)
        elif barrier.report_at is None:
            delay = _RELAY_UPDATE_SECONDS if barrier.is_reported else _RELAY_PARTIAL_SECONDS
            barrier.report_at = self.clock() + delay

    def tick(self, now: float) -> None:
        super().tick(now)
        for barrier in self.pending.values():
            if barrier.report_at is not None and barrier.report_at <= now:
                self._report(barrier, barrier.count)
        self.link.tick(now)

    def _report(self, barrier: Barrier, count: int) -> None:
        """Send the members that have arrived so far and their data; again when more have arrived."""
        header, body = barrier.payload.part()
        patience = min(waiter.deadline for waiter in barrier.waiters.values()) - self.clock()
        calls = [[call, to_ranges(mask & barrier.arrived)] for call, mask in barrier.calls.items()]
        group, kind, name = barrier.key
        header |= {"do": kind, "group": group, "name": name, "count": count, "timeout": round(max(0.0, patience), 3)}
        header |= {"members": to_ranges(barrier.arrived), "calls": calls, "again": barrier.is_reported}
        self.link.send(encode(header, body))
        barrier.is_reported, barrier.report_at = True, None

    def _on_timeout(self, barrier: Barrier, late: list[StoreParticipant]) -> None:
        """The parent has not named the missing members in time: here only its silence is known."""
        why = f"{self.parent.endpoint} has not answered in time"
        self._withdraw(barrier, late, barrier.frame({"error": "store", "why": why}))

    def ask(self, request: Header, body: Body, reply: Reply) -> None:
        if self._lost:
            reply({"error": "store", "why": self._lost}, b"")
            return
        self._number += 1
        self._asked[self._number] = reply
        self.link.send(encode(request | {"id": self._number}, body))

    # from the parent

    def heard(self, head: bytes, body: Body) -> None:
        """Read a frame of the parent: an answer to a barrier or a request. Raises ProtocolError.

        ``head``: its header as it came.
        """
        header = parse(head)
        if "to" in header:
            self._answered(LENGTHS.pack(len(head), len(body)) + head + body, header)
        elif "beat" not in header:
            reply = self._asked.pop(header.integer("id", 0, 1 << 60), None)
            if reply is not None:
                reply({name: value for name, value in header.items() if name != "id"}, body)

    def _answered(self, frame: bytes, header: Header) -> None:
        barrier = self.pending.get(_key(header["to"]))
        if barrier is None:
            return
        if header.get("error") != "timeout":
            self._finish(barrier, frame)
            return
        soon = self.clock() + 0.25
        self._withdraw(barrier, [who for who, waiter in barrier.waiters.items() if waiter.deadline <= soon], frame)
        barrier.is_reported = False
        if barrier.waiters:
            self._report(barrier, barrier.count)


def _key(parts: object) -> Key:
    if not isinstance(parts, list) or len(parts) != 3 or not all(isinstance(part, str) for part in parts):
        raise ProtocolError("an answer does not name its barrier")
    if parts[1] not in KINDS:
        raise ProtocolError("an answer names a barrier of no kind")
    return Key(*parts)


class Connection(asyncio.Protocol):
    """A connection of a server. ``hear`` is given every frame; what it raises, or a frame that is too long, ends it."""

    def __init__(self, clock: Callable[[], float], most_bytes: int) -> None:
        self.clock = clock
        self.decoder = Decoder(most_bytes)
        self.heard_at = clock()
        self._transport: asyncio.Transport | None = None

    def hear(self, head: bytes, body: Body) -> None:
        """Read a frame: its header as it came, and its body. Raises ProtocolError."""
        raise NotImplementedError

    def broken(self, why: str) -> None:  # noqa: ARG002
        """End the connection: the other side violates the protocol, so that its messages cannot be trusted."""
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.clock()
        try:
            for head, body in self.decoder.feed(data):
                if not self.is_open:
                    return
                self.hear(head, body)
        except ProtocolError as error:
            self.broken(str(error))

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, frame: bytes) -> None:
        if self._transport is not None and self.is_open:
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class RelayLink(Connection):
    """The relay's connection to its parent, which has accepted it."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay.clock, MOST_BODY_BYTES)
        self._relay = relay
        self._is_closed = False
        self._beat_at = 0.0

    def hear(self, head: bytes, body: Body) -> None:
        self._relay.heard(head, body)

    def tick(self, now: float) -> None:
        silence = self._relay.parent.silence_seconds
        if self.is_open and now - self.heard_at > silence:
            self.broken(f"not heard of for {silence:g} s")
        elif self.is_open and now >= self._beat_at:
            self._beat_at = now + silence / _BEATS_PER_SILENCE
            self.send(encode({"do": "beat"}))

    def connection_lost(self, error: Exception | None) -> None:
        self.broken(str(error or "the connection was closed"))

    def broken(self, why: str) -> None:
        is_ours = self._is_closed
        self.close()
        if not is_ours:
            self._relay.parent_lost(why)

    def close(self) -> None:
        self._is_closed = True
        super().close()
