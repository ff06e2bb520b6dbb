"""The rendezvous store's server, which all members of a job connect to, and which reports missing members.

Beyond a key-value store it offers *barriers* that know which members are missing, notice a member whose connection
breaks, and report it to every waiting member. It needs no Paddle, so that launchers can host it and outlive the ranks.
In a job of many nodes each has a server: one is the root of a round, the others relay to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fleet_train.cluster.store.access import Access, Callers, Refused
from fleet_train.cluster.store.members import Pace, PacedSelector
from fleet_train.cluster.store.relay import Parent
from fleet_train.cluster.store.session import Session
from fleet_train.cluster.store.state import ServerState
from fleet_train.cluster.store.wire import Json
from fleet_train.errors import ClusterError

_BACKLOG = 4096
# How many connections are accepted in one iteration of the loop, so that many of them do not delay a barrier.
_ACCEPTED_AT_ONCE = 64
# Open files that a process needs besides the store's connections.
_OTHER_DESCRIPTORS = 256
_CONNECTIONS_PER_MEMBER = 3

T = TypeVar("T")


class StoreServer:
    """Host the store on ``host:port`` (0 picks a free port) from a thread of this process.

    ``callers``: the accepted addresses; None for all. With a secret in ``access`` they are ignored.
    ``members``: how many connect here at most; the process's limit of open files is raised for them.
    ``say``: called with messages about refused connections, from the server's thread.
    ``begins_rounds``: whether a member may begin a round that has not been opened.
    Raises ClusterError if the address cannot be bound, or the limit cannot be raised.
    """

    def __init__(
        self,
        host: str,
        port: int,
        access: Access | None = None,
        callers: Callers | None = None,
        members: int = 0,
        say: Callable[[str], None] | None = None,
        begins_rounds: bool = True,
    ) -> None:
        self.host = host
        self.port = port
        self._access = access or Access()
        self._callers = callers
        self._members = members
        self._say = say
        self._begins_rounds = begins_rounds
        self._state: ServerState | None = None
        self._pace = Pace()
        self._loop = asyncio.SelectorEventLoop(PacedSelector(self._pace))
        self._loop.set_exception_handler(self._no_traceback)
        self._printed: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="fleet_train store", daemon=True)
        self._bound = threading.Event()
        self._bind_error: OSError | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> StoreServer:
        raise_descriptor_limit(self._members * _CONNECTIONS_PER_MEMBER + _OTHER_DESCRIPTORS)
        self._thread.start()
        self._bound.wait()
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
        return self._state.present(group, scope) if self._state is not None else set()

    def has_members(self) -> bool:
        """Whether any member is connected (a racy reading)."""
        return self._state is not None and self._state.has_members

    def publish(self, name: str, key: str, value: Json) -> None:
        """Set a value in the round ``name``, as a member's ``set`` does, without a connection."""

        async def published(state: ServerState) -> None:
            state.open_root(name).put(key, json.dumps(value).encode())

        self._do(published, 10.0)

    def open_root(self, name: str) -> None:
        """Let relays of other nodes connect to the round ``name``, whose root is here."""

        async def opened(state: ServerState) -> None:
            state.open_root(name)

        self._do(opened, 10.0)

    def open_relay(self, parent: Parent, timeout_seconds: float) -> None:
        """Relay a round to ``parent``. Raises ClusterError if the parent does not accept this relay in that time."""

        async def opened(state: ServerState) -> None:
            await state.open_relay(parent, timeout_seconds)

        try:
            self._do(opened, timeout_seconds + 10.0)
        except Refused as refusal:
            raise ClusterError(str(refusal)) from None

    def close_round(self, name: str) -> None:
        """Stop relaying a round; no effect if its root is here."""

        async def closed(state: ServerState) -> None:
            state.close_round(name)

        self._do(closed, 10.0)

    def _do(self, work: Callable[[ServerState], Coroutine[Any, Any, T]], timeout_seconds: float) -> T:
        assert self._state is not None
        return asyncio.run_coroutine_threadsafe(work(self._state), self._loop).result(timeout_seconds)

    def _no_traceback(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Asyncio's handler prints a traceback per refused connection when descriptors run out. Errors of a connection
        are reported when it ends; errors of ours must stay visible, each place in the code once: strangers may repeat
        what causes them."""
        error = context.get("exception")
        if isinstance(error, (OSError, asyncio.CancelledError)) or error is None:
            return
        import traceback

        place = str(traceback.extract_tb(error.__traceback__)[-1:])
        if place not in self._printed:
            self._printed.add(place)
            traceback.print_exception(error)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._bound.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        self._state = ServerState(
            self._access, self._callers, say=self._say, begins_rounds=self._begins_rounds, pace=self._pace
        )
        try:
            server = await listen(self._state, self.host, self.port)
        except OSError as error:
            self._bind_error = error
            return
        self.port = server.sockets[0].getsockname()[1]
        self._bound.set()
        await self._stopping.wait()
        server.close()
        self._state.close()
        await asyncio.sleep(0)  # connections send their last message in the loop's next iteration


async def listen(state: ServerState, host: str, port: int) -> asyncio.Server:
    """Accept connections for ``state`` on the running loop. Raises OSError if the address cannot be bound."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Session(state), sock=sock, backlog=_ACCEPTED_AT_ONCE)
    except BaseException:
        sock.close()
        raise
    sock.listen(_BACKLOG)
    return server


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process open this many files. Raises ClusterError if the hard limit is lower, with the fix."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ClusterError(
            f"the rendezvous store needs {wanted} open files (ulimit -n) for this job, and this process may have "
            f"{hard} at most; raise the hard limit (LimitNOFILE of the service, /etc/security/limits.conf, or the "
            "container's --ulimit nofile)"
        )
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
