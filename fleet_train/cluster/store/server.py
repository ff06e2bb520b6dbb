"""The rendezvous store's server, which all members of a job connect to, and which reports missing members.

Beyond a key-value store it offers *barriers* that know which members are missing, notice a member whose connection
breaks, and report it to every waiting member. It needs no Paddle, so that launchers can host it and outlive the ranks.
In a job of many nodes each has a server: one is the root of a namespace, the others relay to it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fleet_train.cluster.store.access import Access, Callers, Refused, Strangers, accept, challenge
from fleet_train.cluster.store.namespace import Root, StoreNamespace, via_of
from fleet_train.cluster.store.relay import Connection, Parent, Relay
from fleet_train.cluster.store.wire import (
    KINDS,
    MOST_BODY_BYTES,
    MOST_MEMBERS,
    MOST_NAME,
    STRANGERS_BYTES,
    Arrival,
    Body,
    Fields,
    Header,
    Json,
    ProtocolError,
    encode,
    parse,
    raise_descriptor_limit,
    to_json,
)
from fleet_train.errors import ClusterError
from fleet_train.log import logger

_STORE_TICK_SECONDS = 0.05
"""How exactly the store keeps timeouts."""
_STORE_REQUEST_SECONDS = 10.0
"""How long the store's thread may take for a request of another thread: it does nothing that takes longer."""
_STORE_INNER_NAMESPACE_SECONDS = 30.0
"""How long a relay tries to open a namespace within another one: its parent answers already."""
_STRANGERS_SECONDS = 5.0
"""How long a connection to the store may take to prove that it belongs to the job: one exchange of messages."""

# The most unauthenticated connections: beyond these the oldest one is closed.
_MOST_STRANGERS = 256
_MOST_NAMESPACES = 4096
_MOST_REFUSALS_LOGGED = 8
_BACKLOG = 4096
# How many connections are accepted in one iteration of the loop, so that many of them do not delay a barrier.
_ACCEPTED_AT_ONCE = 64
# Open files that a process needs besides the store's connections.
_OTHER_DESCRIPTORS = 256
_CONNECTIONS_PER_MEMBER = 3


class StoreServer:
    """Host the store on ``host:port`` (0 picks a free port) from a thread of this process.

    ``callers``: the accepted addresses; None for all. With a secret in ``access`` they are ignored.
    ``members``: how many connect here at most; the process's limit of open files is raised for them.
    ``begins_namespaces``: whether a member may begin a namespace that has not been opened. ``logs_refusals``: whether a
    connection from another address is reported.
    ``start`` raises ClusterError if the address cannot be bound, or the limit cannot be raised.
    """

    def __init__(
        self,
        host: str,
        port: int,
        access: Access | None = None,
        callers: Callers | None = None,
        members: int = 0,
        begins_namespaces: bool = True,
        logs_refusals: bool = True,
    ) -> None:
        self.host = host
        self.port = port
        self.access = access or Access()
        self.namespaces: dict[str, StoreNamespace] = {}
        self._callers = callers if self.access.secret is None else None
        self._members = members
        self._begins_namespaces = begins_namespaces
        self._logs_refusals = logs_refusals
        self._strangers: Strangers[StoreSession] = Strangers(_MOST_STRANGERS, lambda stranger: stranger.abort())
        self._known: set[StoreSession] = set()
        self._refused: set[str] = set()
        self._opening: set[str] = set()
        self.names = (f"{secrets.token_hex(8)}-{number}" for number in itertools.count())
        self._printed: set[str] = set()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()

    # from any thread

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> StoreServer:
        raise_descriptor_limit(self._members * _CONNECTIONS_PER_MEMBER + _OTHER_DESCRIPTORS)
        try:
            listener = self._bind()
        except OSError as error:
            raise ClusterError(
                f"the rendezvous store cannot listen on {self.endpoint}: {error.strerror or error}; "
                "free that port or choose another --started_port"
            ) from None
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="fleet_train store", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Close the port and every connection; returns when the thread has ended."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout=_STORE_REQUEST_SECONDS)

    def connected_members(self, group: str = "rank", namespace: str = "") -> set[int]:
        """The members of ``group`` that are connected now to a namespace whose root is here (a racy reading)."""
        root = self.namespaces.get(namespace)
        return root.present(group) if isinstance(root, Root) else set()

    def has_members(self) -> bool:
        """Whether any member is connected (a racy reading)."""
        roots = [each for each in self.namespaces.copy().values() if isinstance(each, Root)]
        return any(root.has_members for root in roots) or any(each.stands_for_members for each in self._known.copy())

    def publish(self, name: str, key: str, value: Json) -> None:
        """Set a value in the namespace ``name``, as a member's ``set`` does, without a connection."""
        self._do(lambda: self.root(name).put(key, to_json(value)))

    def open_root(self, name: str) -> None:
        """Let relays of other nodes connect to the namespace ``name``, whose root is here."""
        self._do(lambda: self.root(name))

    def open_relay(self, parent: Parent, timeout_seconds: float) -> None:
        """Relay a namespace to ``parent``. Raises ClusterError if it does not accept this relay in that time."""
        sock = parent.dial(timeout_seconds)

        async def attach() -> None:
            relay = Relay(self.clock, parent)
            await self._loop.create_connection(lambda: relay.link, sock=sock)
            self.namespaces[parent.namespace] = relay

        try:
            self._do(attach)
        except BaseException:
            sock.close()
            raise

    def close_namespace(self, name: str) -> None:
        """Stop relaying a namespace and those within it; one whose root is here stays readable."""
        self._do(lambda: self._close_namespace(name))

    def _do(self, work: Callable[[], object]) -> None:
        """Do some work in the server's thread, and wait for it, also for a coroutine."""

        async def done() -> None:
            answer = work()
            if asyncio.iscoroutine(answer):
                await answer

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(_STORE_REQUEST_SECONDS)

    # the thread

    def _run(self, listener: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._serve(listener))
        finally:
            self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        server = await self._accept(listener)
        await self._stopping.wait()
        server.close()
        self._close_all()
        await asyncio.sleep(0)  # connections send their last message in the loop's next iteration

    def _close_all(self) -> None:
        for name in list(self.namespaces):
            self._close_namespace(name)
        for session in [*self._strangers, *self._known]:
            session.abort()

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self.port = listener.getsockname()[1]
        return listener

    async def _accept(self, listener: socket.socket) -> asyncio.Server:
        self._begin()
        server = await self._loop.create_server(lambda: StoreSession(self), sock=listener, backlog=_ACCEPTED_AT_ONCE)
        listener.listen(_BACKLOG)
        return server

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._no_traceback)
        self._tick()

    def clock(self) -> float:
        return self._loop.time()

    def _tick(self) -> None:
        """Let time pass for all connections and namespaces: one clock for all timeouts."""
        self._loop.call_later(_STORE_TICK_SECONDS, self._tick)
        now = self.clock()
        for session in [*self._strangers, *self._known]:
            session.tick(now)
        for namespace in list(self.namespaces.values()):
            namespace.tick(now)

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

    def admit(self, session: StoreSession, address: str) -> bool:
        """Whether a connection from an address may authenticate itself."""
        if self._callers is None or self._callers.hears(address):
            self._strangers.add(session)
            return True
        is_new = address not in self._refused and len(self._refused) < _MOST_REFUSALS_LOGGED
        if self._logs_refusals and not self.may_admit_later and is_new:
            self._refused.add(address)
            logger.warning(f"refused a connection from {address}, which is not in the node list")
        return False

    @property
    def may_admit_later(self) -> bool:
        """Whether the accepted addresses may change."""
        return self._callers is not None and self._callers.may_change

    def know(self, session: StoreSession) -> None:
        self._strangers.remove(session)
        self._known.add(session)

    def forget(self, session: StoreSession) -> None:
        self._strangers.remove(session)
        self._known.discard(session)

    # namespaces

    def find(self, name: str, *, is_relay: bool) -> StoreNamespace | None:
        """The namespace of that name; None if it is not open, now or at all.

        Members may begin a namespace if the server is not a relay, others wait until it is opened. A namespace within
        another (``0.selftest`` in ``0``) has its tree, and is opened on the first request for it.
        """
        if name in self.namespaces:
            return self.namespaces[name]
        outer = self.namespaces.get(name.partition(".")[0])
        if isinstance(outer, Relay):
            if name not in self._opening:
                self._opening.add(name)
                parent = replace(outer.parent, namespace=name)
                threading.Thread(target=self._open_inner, args=(parent,), name="fleet_train relay", daemon=True).start()
            return None
        if (outer is None and (is_relay or not self._begins_namespaces)) or len(self.namespaces) >= _MOST_NAMESPACES:
            return None
        return self.root(name)

    def _open_inner(self, parent: Parent) -> None:
        """Open a relay's namespace, in a thread of its own. Whoever asks meanwhile is refused for now, and asks
        again."""
        try:
            with suppress(ClusterError, OSError, RuntimeError, TimeoutError):
                self.open_relay(parent, _STORE_INNER_NAMESPACE_SECONDS)
        finally:
            self._opening.discard(parent.namespace)

    def root(self, name: str) -> Root:
        """A namespace whose root is here. What members have begun is kept."""
        root = self.namespaces.setdefault(name, Root(self.clock))
        assert isinstance(root, Root)
        return root

    def _close_namespace(self, name: str) -> None:
        for inner, namespace in list(self.namespaces.items()):
            if inner.partition(".")[0] == name and isinstance(namespace, Relay):
                namespace.link.close()
                del self.namespaces[inner]

    def lose(self, machine: str, how: str) -> None:
        """The machine is silent: its members count as lost in every namespace."""
        for namespace in list(self.namespaces.values()):
            if isinstance(namespace, Root):
                namespace.depart(machine, how)


class StoreSession(Connection):
    """The messages of one connection, checked field by field, and their answers."""

    def __init__(self, server: StoreServer) -> None:
        super().__init__(server.clock, STRANGERS_BYTES)
        self._server = server
        self._challenge = challenge(server.access)
        self._name = next(server.names)
        """The name that tells this connection from all others of the job: its members are present by way of it."""
        self._began = server.clock()
        self._namespace: StoreNamespace | None = None
        self._group: str | None = None
        """The group of the connection's members; None before its hello."""
        self._member = -1
        self._is_relay = False
        self._is_watched = False
        self._address = ""
        self._machine = ""
        self._silence: float | None = None
        self._how_lost = "its connection broke"

    @property
    def stands_for_members(self) -> bool:
        """Whether the connection is of members that are still there. Of a relay's members only the root knows who is
        left: see ``Root.has_members``."""
        return self._is_watched or (self._is_relay and isinstance(self._namespace, Relay))

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
        if self._namespace is not None:
            self._namespace.forget(self)
            self._depart(self._how_lost)

    def _depart(self, how: str) -> None:
        if self._namespace is not None and (self._is_watched or self._is_relay):
            self._is_watched = False
            self._namespace.depart(self._name, how)

    def tick(self, now: float) -> None:
        """Close the connection if it does not greet in time. Treat it as lost, and all members on the same machine,
        once it is silent for too long."""
        if not self.is_open:
            return
        if self._namespace is None:
            if now - self._began >= _STRANGERS_SECONDS:
                self.close()
        elif self._silence is not None and now - self.heard_at > self._silence:
            how = f"not heard of for {self._silence:g} s"
            if self._is_relay:
                self._how_lost = f"the relay of {self._machine} was {how}"
            else:
                self._server.lose(self._machine, how)
            self.abort()

    # who it is

    def _greet(self, hello: Fields) -> None:
        try:
            if self._group is not None:
                raise ProtocolError("a second hello")
            proof = accept(self._server.access, self._challenge, hello)
            self._identify(hello)
            namespace = self._server.find(hello.text("namespace", most=MOST_NAME), is_relay=self._is_relay)
            if namespace is None:
                raise Refused("it is not open", kind="closed")
        except Refused as refusal:
            self._refuse(refusal.kind)
            return
        if self._is_watched:
            request = {"do": "join", "group": self._group, "member": self._member, "via": [self._machine, self._name]}
            namespace.ask(request, b"", lambda answer, _: self._welcome(namespace, answer, proof))
        else:
            self._welcome(namespace, {}, proof)

    def _refuse(self, kind: str) -> None:
        more: Header = {}
        if kind == "job":
            more = {"job": self._server.access.job}
        elif kind == "address":
            more = {"address": self._address, "later": self._server.may_admit_later}
        self.send(encode({"error": kind, **more}))
        self.close()

    def _identify(self, hello: Fields) -> None:
        self._group = hello.text("group", most=MOST_NAME)
        self._member = hello.integer("member", 0, MOST_MEMBERS - 1)
        self._is_relay = hello.text("role", "member", most=20) == "relay"
        self._machine = hello.text("machine", "", most=MOST_NAME)
        self._is_watched = hello.flag("watched") and not self._is_relay
        if self._is_relay:
            self._how_lost = f"the relay of {self._machine} was lost"
        else:  # a connection can lose only the machine that it comes from
            self._machine = f"{self._machine} at {self._address}" if self._machine else self._name
        if self._is_relay or self._is_watched:
            self._silence = hello.optional_seconds("silence")

    def _welcome(self, namespace: StoreNamespace, answer: Header, proof: str) -> None:
        if not self.is_open:
            if self._is_watched and "error" not in answer:
                namespace.depart(self._name, self._how_lost)
        elif "error" in answer:
            self.send(encode(answer))
            self.close()
        else:
            self._server.know(self)
            self._namespace = namespace
            self.decoder.most_bytes = MOST_BODY_BYTES
            self.send(encode({"welcome": True, "proof": proof}))

    # what it asks

    def hear(self, head: bytes, body: Body) -> None:
        fields = parse(head)
        if self._namespace is None:
            self._greet(fields)
            return
        word = fields.text("do", most=20)
        if word in KINDS:
            own = None if self._is_relay else (self._group or "", self._member)
            self._namespace.arrive(Arrival.read(fields, body, self, own))
        elif word == "beat":
            self.send(encode({"beat": True}))
        elif word == "leave":
            self._depart("left")
            self.send(encode({}))
        elif self._is_relay:  # it numbers its requests; the answers have the same numbers
            number = {"id": fields.integer("id", 0, 1 << 60)}
            if word == "join":
                fields["via"] = [*via_of(fields), self._name]
            self._namespace.ask(fields, body, lambda answer, body: self.send(encode(answer | number, body)))
        elif word in ("join", "depart"):
            raise ProtocolError("only a relay may ask for that")
        else:
            self._namespace.ask(fields, body, lambda answer, body: self.send(encode(answer, body)))
