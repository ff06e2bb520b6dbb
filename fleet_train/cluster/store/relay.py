"""A relay: the server of one node in a job of many, between its members and its parent.

It waits until all members below it have arrived at a barrier, sends its parent one reduction, and forwards the answer
unchanged. If members are late, it soon reports those that have arrived, so that the root can name the others. All
other requests are forwarded to the parent. A relay that loses its parent reports that to all that wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from fleet_train.cluster.store import members, payloads
from fleet_train.cluster.store.access import Access, Caller, Refused
from fleet_train.cluster.store.members import Pace
from fleet_train.cluster.store.payloads import KINDS, Told
from fleet_train.cluster.store.rounds import MOST_NAME, Arrival, Barrier, Key, Participant, Reply, Round
from fleet_train.cluster.store.wire import (
    LENGTHS,
    PREAMBLE,
    Body,
    Decoder,
    Fields,
    Header,
    ProtocolError,
    encode,
    keep_alive,
    parse,
)

# How long members may be late before the parent gets a list of those that have arrived.
_PARTIAL_SECONDS = 1.0
# After that: how long further arrivals are collected.
_UPDATE_SECONDS = 0.1
# In addition to a waiter's timeout: how long the parent may take to name the missing members.
_PARENT_GRACE_SECONDS = 2.0
_BEATS_PER_SILENCE = 4
_RETRY_SECONDS = 0.1
_DIAL_SECONDS = 5.0


@dataclass(frozen=True)
class Parent:
    """Where a relay's parent listens, and which members the relay serves."""

    host: str
    port: int
    round_name: str
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


class Relay(Round):
    """A node's part of a round whose root is elsewhere."""

    def __init__(self, clock: Callable[[], float], pace: Pace, parent: Parent) -> None:
        super().__init__(clock, pace, grace_seconds=_PARENT_GRACE_SECONDS)
        self.parent = parent
        self._told: dict[Key, int] = {}
        self._partial: dict[Key, asyncio.TimerHandle] = {}
        self._asked: dict[int, Reply] = {}
        self._number = 0
        self._link: Link | None = None
        self._lost = ""

    # towards the parent

    async def connect(self, timeout_seconds: float) -> None:
        """Raises Refused, with the parent's reason, or after this long without an answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            link = Link(self)
            try:
                source = (self.parent.access.source, 0) if self.parent.access.source else None
                host, port = self.parent.host, self.parent.port
                dialled = loop.create_connection(lambda link=link: link, host, port, local_addr=source)
                await asyncio.wait_for(dialled, _DIAL_SECONDS)
                await asyncio.wait_for(link.ready, _DIAL_SECONDS)
            except (OSError, asyncio.TimeoutError, Refused) as error:
                link.close()
                if loop.time() > deadline or (isinstance(error, Refused) and not error.is_temporary):
                    raise Refused(f"the relay cannot reach its parent at {self.parent.endpoint}: {error}") from None
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._link = link
                return

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def parent_lost(self, why: str) -> None:
        """Report it to all that wait, or ask from now on."""
        self._lost = self._lost or f"{self.parent.endpoint}, the parent of this node's relay: {why}"
        for barrier in list(self.barriers.pending.values()):
            self._finish(barrier, barrier.frame({"error": "store", "why": self._lost}))
        asked, self._asked = self._asked, {}
        for reply in asked.values():
            reply({"error": "store", "why": self._lost}, b"")

    def _send(self, header: Header, body: Body = b"") -> None:
        if self._link is not None:
            self._link.send(encode(header, body))

    # from members and from relays below

    def arrive(self, arrival: Arrival) -> None:
        barrier = self.barriers.take(arrival, self.clock())
        if barrier is None:
            return
        if barrier.too_large or self._lost:
            error = {"error": "large"} if barrier.too_large else {"error": "store", "why": self._lost}
            self._finish(barrier, barrier.frame(error))
            return
        self.barriers.arm(barrier, barrier.waiters[arrival.participant].deadline)
        expected = self.parent.below & members.all_of(barrier.count)
        if barrier.count != arrival.count or not expected & ~barrier.arrived:
            self._tell(barrier, arrival.count)
        elif arrival.key not in self._partial:
            delay = _UPDATE_SECONDS if arrival.key in self._told else _PARTIAL_SECONDS
            self._partial[arrival.key] = asyncio.get_running_loop().call_later(delay, self._tell_partial, arrival.key)

    def _tell_partial(self, key: Key) -> None:
        self._partial.pop(key, None)
        barrier = self.barriers.pending.get(key)
        if barrier is not None and barrier.waiters:
            self._tell(barrier, barrier.count)

    def _tell(self, barrier: Barrier, count: int) -> None:
        """Send the members that have arrived so far and their data; again when more have arrived."""
        header, body = barrier.payload.part()
        patience = min(waiter.deadline for waiter in barrier.waiters.values()) - self.clock()
        calls = [[call, members.ranges(mask & barrier.arrived)] for call, mask in barrier.calls.items()]
        group, kind, name = barrier.key
        header |= {"do": kind, "group": group, "name": name, "count": count, "timeout": round(max(0.0, patience), 3)}
        header |= {"part": True, "members": members.ranges(barrier.arrived), "calls": calls}
        self._send(header | {"again": barrier.key in self._told}, body)
        self._told[barrier.key] = barrier.arrived

    def _finish(self, barrier: Barrier, frame: bytes) -> None:
        self._told.pop(barrier.key, None)
        timer = self._partial.pop(barrier.key, None)
        if timer is not None:
            timer.cancel()
        self.barriers.close(barrier)
        barrier.answer(frame)

    def _on_timeout(self, barrier: Barrier, late: list[Participant]) -> None:
        """The parent has not named the missing members in time: here only its silence is known."""
        frame = barrier.frame({"error": "store", "why": f"{self.parent.endpoint} has not answered in time"})
        for participant in late:
            self.barriers.withdraw(barrier, participant)
            participant.send(frame)

    def ask(self, request: Header, body: Body, reply: Reply) -> None:
        if self._lost:
            reply({"error": "store", "why": self._lost}, b"")
            return
        self._number += 1
        self._asked[self._number] = reply
        self._send({"do": "ask", "id": self._number, "ask": request}, body)

    def depart(self, group: str, mask: int, how: str) -> None:
        self.ask({"do": "depart", "group": group, "members": members.ranges(mask), "how": how}, b"", _nothing)

    # from the parent

    def heard(self, head: bytes, header: Header, body: Body) -> None:
        """A frame of the parent: an answer to a barrier or a request, or a request. Raises ProtocolError.

        ``head``: its header as it came.
        """
        if "to" in header:
            self._answered(LENGTHS.pack(len(head), len(body)) + head + body, header)
        elif header.get("do") == "times":
            self._say_times(Fields(header))
        elif "beat" not in header:
            reply = self._asked.pop(Fields(header).integer("id", 0, 1 << 60), None)
            if reply is not None:
                reply({name: value for name, value in header.items() if name != "id"}, body)

    def _answered(self, frame: bytes, header: Header) -> None:
        key = _key(header["to"])
        barrier = self.barriers.pending.get(key)
        if "error" not in header and key.kind == "barrier":
            number = self.complete(barrier) if barrier else self.times.setdefault(key.group, payloads.Times()).add({})
            if number != header.get("number"):
                raise ProtocolError("barriers are counted differently here and at the root")
        if barrier is None:
            return
        if header.get("error") != "timeout":
            self._finish(barrier, frame)
            return
        self._told.pop(key, None)
        soon = self.clock() + 0.25
        for participant in [who for who, waiter in barrier.waiters.items() if waiter.deadline <= soon]:
            self.barriers.withdraw(barrier, participant)
            participant.send(frame)
        if barrier.waiters:
            self._tell(barrier, barrier.count)

    def _say_times(self, fields: Fields) -> None:
        group, number = fields.text("group", most=MOST_NAME), fields.integer("number", 0, 1 << 60)
        identity = fields.integer("id", 0, 1 << 60)
        answer = asyncio.ensure_future(self.collect_times(group, number))

        def say(done: asyncio.Future[Told]) -> None:
            self._send({"do": "times", "id": identity}, json.dumps(sorted(done.result().items())).encode())

        answer.add_done_callback(say)


def _nothing(_: Header, __: Body) -> None:
    """A departure needs no answer."""


def _key(told: object) -> Key:
    if isinstance(told, list) and len(told) == 3 and all(isinstance(part, str) for part in told) and told[1] in KINDS:
        return Key(*told)
    raise ProtocolError("an answer does not name its barrier")


class Link(asyncio.Protocol):
    """The relay's connection to its parent."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._decoder = Decoder(expects_preamble=False)
        self._transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parent = relay.parent
        identity = {"role": "relay", "round": parent.round_name, "group": "relay", "member": parent.number}
        identity |= {"machine": parent.machine, "silence": parent.silence_seconds}
        self._caller = Caller(parent.access, identity)
        self._is_closed = False
        self._heard_at = 0.0
        self._beat: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        transport.write(PREAMBLE + encode(self._caller.hello))

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._relay.clock()
        try:
            for head, body in self._decoder.feed(data):
                header = parse(head)
                if self.ready.done():
                    self._relay.heard(head, header, body)
                else:
                    self._greet(header)
        except ProtocolError as error:
            self._end(str(error))

    def _greet(self, header: Header) -> None:
        try:
            word = self._caller.heard(header)
        except Refused as refusal:
            if not self.ready.done():
                self.ready.set_exception(refusal)
            self.close()
            return
        if word is not None:
            self.send(encode(word))
            return
        self.ready.set_result(None)
        self._keep_beating()

    def _keep_beating(self) -> None:
        silence = self._relay.parent.silence_seconds
        if self._relay.clock() - self._heard_at > silence:
            self._end(f"not heard of for {silence:g} s")
            return
        self.send(encode({"do": "beat"}))
        loop = asyncio.get_running_loop()
        self._beat = loop.call_later(silence / _BEATS_PER_SILENCE, self._keep_beating)

    def send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(OSError("the connection was closed"))
            self.ready.exception()  # mark as retrieved: possibly nothing waits for it any more
            return
        self._end(str(error or "the connection was closed"))

    def _end(self, why: str) -> None:
        is_ours = self._is_closed
        self.close()
        if not is_ours and self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None:
            self._relay.parent_lost(why)

    def close(self) -> None:
        self._is_closed = True
        if self._beat is not None:
            self._beat.cancel()
        if self._transport is not None:
            self._transport.close()
