"""The rendezvous store's server, which all members of a job connect to, and which reports missing members.

Beyond a key-value store it offers *barriers* that know which members are missing, notice a member whose connection
breaks, and report it to every waiting member. It needs no Paddle, so that launchers can host it and outlive the ranks.
In a job of many nodes each has a server: one is the root of a round, the others relay to it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.store import members
from fleet_train.cluster.store.access import Access, Callers, Refused, Strangers, accept, challenge
from fleet_train.cluster.store.payloads import KINDS, Arrival, Key, read_calls
from fleet_train.cluster.store.relay import Connection, Parent, Relay
from fleet_train.cluster.store.rounds import MOST_NAME, Root, Round, via_of
from fleet_train.cluster.store.wire import (
    MOST_BODY_BYTES,
    STRANGERS_BYTES,
    Body,
    Fields,
    Header,
    Json,
    ProtocolError,
    encode,
    parse,
    raise_descriptor_limit,
)
from fleet_train.errors import ClusterError

# The most unauthenticated connections: beyond these the oldest one is closed.
_MOST_STRANGERS = 256
_MOST_ROUNDS = 4096
_MOST_REFUSALS_SAID = 8
_BACKLOG = 4096
# How many connections are accepted in one iteration of the loop, so that many of them do not delay a barrier.
_ACCEPTED_AT_ONCE = 64
# Open files that a process needs besides the store's connections.
_OTHER_DESCRIPTORS = 256
_CONNECTIONS_PER_MEMBER = 3
_RELAYS_ONLY = ("join", "depart")


class StoreServer:
    """Host the store on ``host:port`` (0 picks a free port) from a thread of this process.

    ``callers``: the accepted addresses; None for all. With a secret in ``access`` they are ignored.
    ``members``: how many connect here at most; the process's limit of open files is raised for them.
    ``say``: called with messages about refused connections, from the server's thread.
    ``begins_rounds``: whether a member may begin a round that has not been opened.
    ``start`` raises ClusterError if the address cannot be bound, or the limit cannot be raised.
    """

    def __init__(
        self,
        host: str,
        port: int,
        access: Access | None = None,
        callers: Callers | None = None,
        members: int = 0,
        say: Callable[[str], None] = lambda _: None,
        begins_rounds: bool = True,
    ) -> None:
        self.host = host
        self.port = port
        self.access = access or Access()
        self.rounds: dict[str, Round] = {}
        self._callers = callers if self.access.secret is None else None
        self._members = members
        self._say = say
        self._begins_rounds = begins_rounds
        self._strangers: Strangers[Session] = Strangers(_MOST_STRANGERS, lambda stranger: stranger.abort())
        self._known: set[Session] = set()
        self._refused: set[str] = set()
        self._opening: dict[str, asyncio.Future[None]] = {}
        self._names = (f"{secrets.token_hex(8)}-{number}" for number in itertools.count())
        self._printed: set[str] = set()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="fleet_train store", daemon=True)
        self._is_bound = threading.Event()
        self._bind_error: OSError | None = None
        self._stopping: asyncio.Event | None = None

    # from any thread

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> StoreServer:
        raise_descriptor_limit(self._members * _CONNECTIONS_PER_MEMBER + _OTHER_DESCRIPTORS)
        self._thread.start()
        self._is_bound.wait()
        if self._bind_error is not None:
            why = self._bind_error.strerror or str(self._bind_error)
            raise ClusterError(
                f"the rendezvous store cannot listen on {self.endpoint}: {why}; "
                "free that port or choose another --started_port"
            )
        return self

    def stop(self) -> None:
        """Close the port and every connection; returns when the thread has ended."""
        if self._thread.is_alive() and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout=10)

    def connected_members(self, group: str = "rank", scope: str = "") -> set[int]:
        """The members of ``group`` that are connected now to a round whose root is here (a racy reading)."""
        scoped = self.rounds.get(scope)
        return scoped.present(group) if isinstance(scoped, Root) else set()

    def has_members(self) -> bool:
        """Whether any member is connected (a racy reading)."""
        roots = [round_ for round_ in self.rounds.copy().values() if isinstance(round_, Root)]
        return any(root.has_members for root in roots) or any(each.stands_for_members for each in self._known.copy())

    def publish(self, name: str, key: str, value: Json) -> None:
        """Set a value in the round ``name``, as a member's ``set`` does, without a connection."""
        self._do(lambda: self.root(name).put(key, json.dumps(value).encode()))

    def open_root(self, name: str) -> None:
        """Let relays of other nodes connect to the round ``name``, whose root is here."""
        self._do(lambda: self.root(name))

    def open_relay(self, parent: Parent, timeout_seconds: float) -> None:
        """Relay a round to ``parent``. Raises ClusterError if the parent does not accept this relay in that time."""
        try:
            self._do(lambda: self.relay(parent, timeout_seconds), timeout_seconds)
        except Refused as refusal:
            raise ClusterError(str(refusal)) from None

    def close_round(self, name: str) -> None:
        """Stop relaying a round and those within it; a round whose root is here stays readable."""
        self._do(lambda: self._close_round(name))

    def _close_round(self, name: str) -> None:
        for inner, round_ in list(self.rounds.items()):
            if inner.partition(".")[0] == name and isinstance(round_, Relay):
                round_.close()
                del self.rounds[inner]

    def _do(self, work: Callable[[], object], timeout_seconds: float = 0.0) -> None:
        """In the server's thread; waits for it, also for a coroutine."""

        async def done() -> None:
            answer = work()
            if asyncio.iscoroutine(answer):
                await answer

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(timeout_seconds + timeouts.STORE_REQUEST_SECONDS)

    # the thread

    def _run(self) -> None:
        loop = asyncio.SelectorEventLoop()
        try:
            loop.run_until_complete(self._serve())
        finally:
            self._is_bound.set()
            loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        try:
            server = await self.listen()
        except OSError as error:
            self._bind_error = error
            return
        self._is_bound.set()
        await self._stopping.wait()
        server.close()
        self._close_all()
        await asyncio.sleep(0)  # connections send their last message in the loop's next iteration

    def _close_all(self) -> None:
        for name in list(self.rounds):
            self._close_round(name)
        for session in [*self._strangers, *self._known]:
            session.abort()

    async def listen(self) -> asyncio.Server:
        """Accept connections on the running loop. Raises OSError if the address cannot be bound."""
        self._begin()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self.host, self.port))
            server = await self._loop.create_server(lambda: Session(self), sock=sock, backlog=_ACCEPTED_AT_ONCE)
        except BaseException:
            sock.close()
            raise
        sock.listen(_BACKLOG)
        self.port = sock.getsockname()[1]
        return server

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._no_traceback)
        self._tick()

    def clock(self) -> float:
        return self._loop.time()

    def _tick(self) -> None:
        """One clock for all timeouts."""
        self._loop.call_later(timeouts.STORE_TICK_SECONDS, self._tick)
        now = self.clock()
        for session in [*self._strangers, *self._known]:
            session.tick(now)
        for round_ in list(self.rounds.values()):
            round_.tick(now)

    def _no_traceback(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Asyncio's handler prints a traceback per refused connection when descriptors run out. Errors of a connection
        are reported when it ends; errors of ours must stay visible, each place in the code once: strangers may repeat
        what causes them."""
        error = context.get("exception")
        if isinstance(error, (OSError, asyncio.CancelledError)) or error is None:
            return
        place = str(traceback.extract_tb(error.__traceback__)[-1:])
        if place not in self._printed:
            self._printed.add(place)
            traceback.print_exception(error)

    # connections; from here on only the loop's thread calls

    def new_name(self) -> str:
        """For a connection; no other server of the job gives the same."""
        return next(self._names)

    def admit(self, session: Session, address: str) -> bool:
        """Whether a connection from there may authenticate itself."""
        if self._callers is None or self._callers.hears(address):
            self._strangers.add(session)
            return True
        if not self.may_admit_later and address not in self._refused and len(self._refused) < _MOST_REFUSALS_SAID:
            self._refused.add(address)
            self._say(f"refused a connection from {address}, which is not in the node list")
        return False

    @property
    def may_admit_later(self) -> bool:
        """Whether the accepted addresses may change."""
        return self._callers is not None and self._callers.may_change

    def know(self, session: Session) -> None:
        self._strangers.remove(session)
        self._known.add(session)

    def forget(self, session: Session) -> None:
        self._strangers.remove(session)
        self._known.discard(session)

    # rounds

    def find_round(self, name: str, *, is_relay: bool, then: Callable[[Round | None], None]) -> None:
        """Call ``then`` with the round of that name; None if it is not open.

        Members may begin a round if the server is not a relay, others wait until it is opened. A round within another
        (``0.selftest`` in ``0``) has its tree, and is opened on the first request for it.
        """
        outer = self.rounds.get(name.partition(".")[0])
        if name in self.rounds:
            then(self.rounds[name])
        elif isinstance(outer, Relay):
            if name not in self._opening:
                parent = replace(outer.parent, round_name=name)
                self._opening[name] = asyncio.ensure_future(self.relay(parent, timeouts.STORE_INNER_ROUND_SECONDS))
                self._opening[name].add_done_callback(lambda _: self._opening.pop(name, None))
            self._opening[name].add_done_callback(
                lambda done: then(None if done.cancelled() or done.exception() else self.rounds[name])
            )
        elif (outer is None and (is_relay or not self._begins_rounds)) or len(self.rounds) >= _MOST_ROUNDS:
            then(None)
        else:
            then(self.root(name))

    def root(self, name: str) -> Root:
        """A round whose root is here. What members have begun is kept."""
        round_ = self.rounds.setdefault(name, Root(self.clock))
        assert isinstance(round_, Root)
        return round_

    async def relay(self, parent: Parent, timeout_seconds: float) -> None:
        """A round whose root is elsewhere. Raises Refused if the parent does not accept this relay."""
        relay = Relay(self.clock, parent)
        await relay.connect(timeout_seconds)
        self.rounds[parent.round_name] = relay

    def lose(self, machine: str, how: str) -> None:
        """The machine is silent: its members count as lost in every round."""
        for round_ in list(self.rounds.values()):
            if isinstance(round_, Root):
                round_.depart(machine, how)


class Session(Connection):
    """The messages of one connection, checked field by field, and their answers."""

    def __init__(self, server: StoreServer) -> None:
        super().__init__(server.clock, STRANGERS_BYTES)
        self._server = server
        self._challenge = challenge(server.access)
        self._proof = ""
        self._name = server.new_name()
        """Distinguishes this connection from all others of the job: its members are present by way of it."""
        self._began = server.clock()
        self._round: Round | None = None
        self._group: str | None = None
        """None before its hello."""
        self._member = -1
        self._is_relay = False
        self._is_watched = False
        self._address = ""
        self._machine = ""
        self._silence: float | None = None
        self._how_lost = "its connection broke"

    @property
    def stands_for_members(self) -> bool:
        """Of a relay's members only the root knows who is left: see ``Root.has_members``."""
        return self._is_watched or (self._is_relay and self._round is not None and not isinstance(self._round, Root))

    # the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        if self._server.admit(self, self._address):
            self.send(encode(self._challenge))
        else:
            self._refuse("address")

    def pause_writing(self) -> None:
        """The other side does not read: reading from it stops until it does, so that answers do not accumulate."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self._server.forget(self)
        if self._round is not None:
            self._round.forget(self)
            self._depart(self._how_lost)

    def _depart(self, how: str) -> None:
        if self._round is not None and (self._is_watched or self._is_relay):
            self._is_watched = False
            self._round.depart(self._name, how)

    def tick(self, now: float) -> None:
        """Close it if it does not greet in time. Treat it as lost, and all members on the same machine, once it is
        silent for too long."""
        if not self.is_open:
            return
        if self._round is None:
            if now - self._began >= timeouts.STRANGERS_SECONDS:
                self.close()
        elif self._silence is not None and now - self.heard_at > self._silence:
            how = f"not heard of for {self._silence:g} s"
            if self._is_relay:
                self._how_lost = f"the relay of {self._machine} was {how}"
            else:
                self._server.lose(self._machine, how)
            self.abort()

    def hear(self, head: bytes, body: Body) -> None:
        header = parse(head)
        if self._round is None:
            self._greet(header)
            return
        fields = Fields(header)
        word = fields.text("do", most=20)
        if word in KINDS:
            self._arrive(self._round, fields, body)
        elif word == "beat":
            self.send(encode({"beat": True}))
        elif word == "leave":
            self._depart("left")
            self.send(encode({}))
        elif word in _RELAYS_ONLY and not self._is_relay:
            raise ProtocolError("only a relay may ask for that")
        else:
            self._ask(self._round, fields, body)

    # who it is

    def _greet(self, header: Header) -> None:
        try:
            if self._group is not None:
                raise ProtocolError("a second hello")
            self._proof = accept(self._server.access, self._challenge, header)
        except Refused as refusal:
            self._refuse(refusal.kind)
        else:
            self._take(Fields(header))

    def _refuse(self, kind: str) -> None:
        more: Header = {}
        if kind == "job":
            more = {"job": self._server.access.job}
        elif kind == "address":
            more = {"address": self._address, "later": self._server.may_admit_later}
        self.send(encode({"error": kind, **more}))
        self.close()

    def _take(self, hello: Fields) -> None:
        self._group = hello.text("group", most=MOST_NAME)
        self._member = hello.integer("member", 0, members.MOST_MEMBERS - 1)
        self._is_relay = hello.text("role", "member", most=20) == "relay"
        self._machine = hello.text("machine", "", most=MOST_NAME)
        self._is_watched = hello.flag("watched") and not self._is_relay
        if self._is_relay:
            self._how_lost = f"the relay of {self._machine} was lost"
        else:  # a connection can lose only the machine that it comes from
            self._machine = f"{self._machine} at {self._address}" if self._machine else self._name
        if self._is_relay or self._is_watched:
            self._silence = hello.optional_seconds("silence")
        self._server.find_round(hello.text("round", most=MOST_NAME), is_relay=self._is_relay, then=self._join)

    def _join(self, round_: Round | None) -> None:
        if round_ is None:
            self._refuse("closed")
        elif self._is_watched:
            request = {"do": "join", "group": self._group, "member": self._member, "via": [self._machine, self._name]}
            round_.ask(request, b"", lambda header, _: self._welcome(round_, header))
        else:
            self._welcome(round_, {})

    def _welcome(self, round_: Round, answer: Header) -> None:
        if not self.is_open:
            if self._is_watched and "error" not in answer:
                round_.depart(self._name, self._how_lost)
        elif "error" in answer:
            self.send(encode(answer))
            self.close()
        else:
            self._server.know(self)
            self._round = round_
            self.decoder.most_bytes = MOST_BODY_BYTES
            self.send(encode({"welcome": True, "proof": self._proof}))

    # what it asks

    def _arrive(self, round_: Round, fields: Fields, body: Body) -> None:
        count = fields.integer("count", 1, members.MOST_MEMBERS)
        key = Key(self._group or "", fields.header["do"], fields.text("name", most=MOST_NAME))
        if self._is_relay:
            key = key._replace(group=fields.text("group", most=MOST_NAME))
            mask = members.from_ranges(fields.header.get("members"), count)
            calls = read_calls(fields.header.get("calls"), count)
            if not mask:
                raise ProtocolError("a part without members")
        else:
            if self._member >= count:
                raise ProtocolError("a member sends data of another")
            mask = members.one(self._member)
            calls = {fields.text("call", ""): mask}
        timeout = fields.number("timeout", 1e7)
        again = self._is_relay and fields.flag("again")
        round_.arrive(Arrival(key, self, mask, count, timeout, calls, fields, body, self._is_relay, again))

    def _ask(self, round_: Round, fields: Fields, body: Body) -> None:
        """A relay numbers its requests; the answers have the same numbers."""
        more = {"id": fields.integer("id", 0, 1 << 60)} if self._is_relay else {}
        if self._is_relay and fields.header["do"] == "join":
            fields.header["via"] = [*via_of(fields.header), self._name]
        round_.ask(fields.header, body, lambda header, body: self.send(encode(header | more, body)))
