"""One connection to a server of the store: unauthenticated until its hello is accepted, then a member or a relay."""

from __future__ import annotations

import asyncio

from fleet_train.cluster.store import members, payloads
from fleet_train.cluster.store.access import Callee, Refused
from fleet_train.cluster.store.payloads import KINDS, Told
from fleet_train.cluster.store.rounds import MOST_NAME, Arrival, Key, Reply, Round
from fleet_train.cluster.store.state import ServerState
from fleet_train.cluster.store.wire import (
    MOST_BODY_BYTES,
    STRANGERS_BYTES,
    Body,
    Decoder,
    Fields,
    Header,
    Json,
    ProtocolError,
    encode,
    keep_alive,
    parse,
)

STRANGERS_SECONDS = 5.0
# How long a refused caller may take to read the refusal.
_REFUSAL_SECONDS = 1.0
_PULL_SECONDS = 5.0
_MOST_CALLS = 64
_MOST_TIMES_BYTES = 8 << 20
_RELAYS_ONLY = ("join", "depart")


class Session(asyncio.BufferedProtocol):
    """The messages of one connection, checked field by field, and their answers."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._decoder = Decoder(expects_preamble=True, most_bytes=STRANGERS_BYTES)
        self._callee = Callee(state.access)
        self._transport: asyncio.Transport | None = None
        self._round: Round | None = None
        self._group = ""
        self._member = -1
        self._is_taken = False
        self._is_relay = False
        self._address = ""
        self._machine = ""
        self._silence: float | None = None
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._below: dict[str, int] = {}
        """By group: the members that are present through this connection."""
        self._pulls: dict[int, asyncio.Future[Told]] = {}
        self._pull_number = 0
        self._how_lost = "its connection broke"
        self._is_refused = False

    @property
    def stands_for_members(self) -> bool:
        return any(self._below.copy().values())

    # the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._state.admit(self, self._address):
            self._refuse_address(transport)
            return
        keep_alive(transport.get_extra_info("socket"))
        self._timer = asyncio.get_running_loop().call_later(STRANGERS_SECONDS, self.close)

    def _refuse_address(self, transport: asyncio.Transport) -> None:
        later = self._state.may_admit_later
        self.send(encode({"error": "address", "address": self._address, "later": later}))
        if not later:
            self.close()
            return
        # Closed with its hello unread, the connection would be reset, and the caller would assume that we are dead.
        self._is_refused = True
        self._state.keep_stranger(self)
        transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, self.close)

    def send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def pause_writing(self) -> None:
        """The other side does not read: reading from it stops until it does, so that answers do not accumulate."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._state.forget(self)
        for pull in self._pulls.values():
            pull.cancel()
        if self._round is not None:
            self._round.pulls.pop(self, None)
            self._round.barriers.forget(self)
            self._depart(self._how_lost)

    def _depart(self, how: str) -> None:
        below, self._below = self._below, {}
        if self._round is not None:
            for group, mask in below.items():
                self._round.depart(group, mask, how)

    def get_buffer(self, _: int) -> memoryview:
        """One buffer for all connections: received data is copied out of it at once."""
        return self._state.buffer

    def buffer_updated(self, size: int) -> None:
        self._heard_at = self._state.clock()
        if self._is_refused:
            return
        try:
            for head, body in self._decoder.feed(self._state.buffer[:size]):
                if self._transport is None or self._transport.is_closing():
                    return
                self._hear(parse(head), body)
        except Refused as refusal:
            self._refuse(refusal)
        except ProtocolError:
            self.close()  # a foreign process, or a faulty member: its messages cannot be trusted

    def _hear(self, header: Header, body: Body) -> None:
        fields = Fields(header)
        word = fields.text("do", most=20)
        if self._round is None:
            self._greet(header)
        elif word in KINDS:
            self._arrive(fields, body)
        elif word == "beat":
            self.send(encode({"beat": True}))
        elif word == "leave":
            self._depart("left")
            self.send(encode({}))
        elif self._is_relay:
            self._hear_relay(fields, body)
        elif word in _RELAYS_ONLY:
            raise ProtocolError("only a relay may ask for that")
        else:
            self._round.ask(header, body, self._answer)

    def _answer(self, header: Header, body: Body) -> None:
        self.send(encode(header, body))

    # who it is

    def _greet(self, header: Header) -> None:
        answer, hello = self._callee.heard(header)
        if answer is not None:
            self.send(encode(answer))
        if hello is not None:
            if self._is_taken:
                raise ProtocolError("a second hello")
            self._is_taken = True
            self._take(Fields(hello))

    def _take(self, hello: Fields) -> None:
        self._group = hello.text("group", most=MOST_NAME)
        self._member = hello.integer("member", 0, members.MOST_MEMBERS - 1)
        self._is_relay = hello.text("role", "member", most=20) == "relay"
        self._machine = hello.text("machine", "", most=MOST_NAME)
        if self._machine and not self._is_relay:  # a connection can lose only the machine that it comes from
            self._machine += f" at {self._address}"
        self._silence = hello.optional_seconds("silence")
        if self._is_relay:
            self._how_lost = f"the relay of {self._machine} was lost"
        is_watched = hello.flag("watched") and not self._is_relay
        if not is_watched and not self._is_relay:
            self._silence = None
        name = hello.text("round", most=MOST_NAME)
        self._state.find_round(name, is_relay=self._is_relay, then=lambda found: self._join(found, is_watched))

    def _join(self, found: Round | None, is_watched: bool) -> None:
        if found is None:
            self._refuse(Refused("not opened", kind="closed"))
        elif is_watched:
            request = {"do": "join", "group": self._group, "member": self._member, "machine": self._machine}
            found.ask(request, b"", lambda header, _: self._welcome(found, header, True))
        else:
            self._welcome(found, {}, False)

    def _welcome(self, found: Round, answer: Header, is_watched: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            if is_watched and "error" not in answer:
                found.depart(self._group, members.one(self._member), self._how_lost)
            return
        if "error" in answer:
            self.send(encode(answer))
            self.close()
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._state.know(self)
        self._round = found
        self._decoder.most_bytes = MOST_BODY_BYTES
        if is_watched:
            self._below[self._group] = members.one(self._member)
        if self._is_relay:
            found.pulls[self] = self._pull
        if self._silence is not None:
            self._watch()
        self.send(encode({"welcome": True}))

    def _refuse(self, refusal: Refused) -> None:
        more = {"job": self._state.access.job} if refusal.kind == "job" else {}
        self.send(encode({"error": refusal.kind, **more}))
        self.close()

    def _watch(self) -> None:
        """Treat it as lost, and all members on the same machine, once it is silent for too long."""
        assert self._silence is not None
        silent = self._state.clock() - self._heard_at
        if silent < self._silence:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._silence - silent + 0.001, self._watch)
            return
        how = f"not heard of for {self._silence:g} s"
        if self._is_relay:
            self._how_lost = f"the relay of {self._machine} was {how}"
        else:
            self._state.lose(self._machine, how)
        self.abort()

    # what members ask

    def _arrive(self, fields: Fields, body: Body) -> None:
        assert self._round is not None
        kind = fields.header["do"]
        count = fields.integer("count", 1, self._state.most_members)
        group = fields.text("group", most=MOST_NAME) if self._is_relay else self._group
        if self._is_relay:
            mask = members.from_ranges(fields.header.get("members"), count)
            calls = _read_calls(fields.header.get("calls"), count)
            if not mask:
                raise ProtocolError("a part without members")
        else:
            if self._member >= count or fields.flag("part"):
                raise ProtocolError("a member sends data of another")
            mask = members.one(self._member)
            calls = {fields.text("call", ""): mask}
        told = {self._member: payloads.read_times(fields.header["times"])} if "times" in fields.header else {}
        key = Key(group, kind, fields.text("name", most=MOST_NAME))
        timeout = fields.number("timeout", 1e7)
        is_again = self._is_relay and fields.flag("again")
        self._round.arrive(Arrival(key, self, mask, count, timeout, calls, fields, body, told, is_again))

    # what relays ask

    def _hear_relay(self, fields: Fields, body: Body) -> None:
        if fields.header.get("do") == "times":
            self._pulled(fields, body)
            return
        if fields.header.get("do") != "ask":
            raise ProtocolError("an unknown message of a relay")
        number, request = fields.integer("id", 0, 1 << 60), fields.header.get("ask")
        if not isinstance(request, dict):
            raise ProtocolError("a request is not an object")
        assert self._round is not None
        self._round.ask(request, body, self._reply_to(number, Fields(request)))

    def _reply_to(self, number: int, request: Fields) -> Reply:
        def reply(header: Header, body: Body) -> None:
            if request.header.get("do") == "join" and "error" not in header:
                self._keep(request)
            elif request.header.get("do") == "depart":
                self._release(request)
            self.send(encode({**header, "id": number}, body))

        return reply

    def _keep(self, joined: Fields) -> None:
        group, member = joined.text("group"), joined.integer("member", 0, members.MOST_MEMBERS - 1)
        self._below[group] = self._below.get(group, 0) | members.one(member)
        if self._transport is None or self._transport.is_closing():  # it was lost before its member had joined
            self._depart(self._how_lost)

    def _release(self, departed: Fields) -> None:
        group = departed.text("group")
        mask = members.from_ranges(departed.header.get("members"), members.MOST_MEMBERS)
        self._below[group] = self._below.get(group, 0) & ~mask

    def _pull(self, group: str, number: int) -> asyncio.Future[Told]:
        self._pull_number += 1
        pull: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._pulls[self._pull_number] = pull
        self.send(encode({"do": "times", "id": self._pull_number, "group": group, "number": number}))
        return asyncio.ensure_future(asyncio.wait_for(pull, _PULL_SECONDS))

    def _pulled(self, fields: Fields, body: Body) -> None:
        pull = self._pulls.pop(fields.integer("id", 0, 1 << 60), None)
        if pull is not None and not pull.done():
            pull.set_result(payloads.read_many_times(_times_of(body), self._state.most_members))


def _read_calls(told: Json, count: int) -> dict[str, int]:
    if not isinstance(told, list) or len(told) > _MOST_CALLS:
        raise ProtocolError("calls are not a list, or too many")
    calls: dict[str, int] = {}
    for pair in told:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ProtocolError("a call is not a pair of text and members")
        calls[pair[0][:MOST_NAME]] = members.from_ranges(pair[1], count)
    return calls


def _times_of(body: Body) -> Json:
    if len(body) > _MOST_TIMES_BYTES:
        raise ProtocolError("times of members are too long")
    return parse(b'{"times":' + body + b"}")["times"]
