"""The rendezvous store's server: where the members of a job meet, and how each learns who is missing.

One server per job, JSON lines over TCP, no pickle. It offers what a key-value store does not: a *gather* that knows
which members it still waits for, notices a member whose connection breaks, and tells every waiter who that was.
It needs no Paddle, so that launchers can host it and outlive the ranks.

A *scope* is a memory of its own within one server: a restarted job meets in a new one, at the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass, field

from fleet_train.cluster.store_wire import Json, keep_alive
from fleet_train.errors import ClusterError

FRAME_LIMIT_BYTES = 64 * 2**20
# How long all members may stand at different meetings before that counts as a mistake and not as a coincidence.
_CROSSED_SECONDS = 1.0


@dataclass
class _Gather:
    """One meeting: who has come with what, and who waits for the rest."""

    count: int
    first: int
    values: dict[int, Json] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    """What each has called in its script to get here, where it has said so."""
    waiting: list[asyncio.Future[Json]] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        return [member for member in range(self.count) if member not in self.values]

    def answer(self, reply: Json) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(reply)
        self.waiting.clear()


class _State:
    """What the server remembers. Touched by the event loop's thread only."""

    def __init__(self) -> None:
        self.values: dict[str, Json] = {}
        self.gathers: dict[tuple[str, str], _Gather] = {}
        self.gone: dict[tuple[str, int], str] = {}
        self.failure: Json = None

    def arrive(self, group: str, member: int, request: Json) -> asyncio.Future[Json]:
        key = (group, request["name"])
        gather = self.gathers.setdefault(key, _Gather(request["count"], member))
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        gather.waiting.append(future)
        if gather.count != request["count"]:
            counts = [[gather.first, gather.count], [member, request["count"]]]
            self._finish(key, gather, {"error": "count", "counts": counts})
            return future
        gather.values[member] = request["value"]
        gather.calls[member] = str(request.get("call", ""))
        if not gather.missing:
            self._finish(key, gather, {"value": [gather.values[i] for i in range(gather.count)]})
        else:
            self._give_up_if_hopeless(key, gather)
            asyncio.get_running_loop().call_later(_CROSSED_SECONDS, self._give_up_if_crossed, group)
        return future

    def _give_up_if_crossed(self, group: str) -> None:
        """All members wait, but at different meetings: nobody will ever come, so say who stands where."""
        pending = {name: gather for (g, name), gather in self.gathers.items() if g == group}
        waiting = sorted(member for gather in pending.values() for member in gather.values)
        if len(pending) < 2 or waiting != list(range(max(gather.count for gather in pending.values()))):
            return
        where = [[member, name, gather.calls[member]] for name, gather in pending.items() for member in gather.values]
        for name, gather in pending.items():
            self._finish((group, name), gather, {"error": "crossed", "where": sorted(where)})

    def _finish(self, key: tuple[str, str], gather: _Gather, reply: Json) -> None:
        gather.answer(reply)
        self.gathers.pop(key, None)

    def _give_up_if_hopeless(self, key: tuple[str, str], gather: _Gather) -> None:
        if self.failure is not None:
            self._finish(key, gather, {"error": "failed", "failure": self.failure})
            return
        gone = [[member, self.gone[(key[0], member)]] for member in gather.missing if (key[0], member) in self.gone]
        if gone:
            call = next(filter(None, gather.calls.values()), "")
            self._finish(key, gather, {"error": "gone", "gone": gone, "call": call})

    def review(self) -> None:
        """Answer every meeting that can no longer be complete."""
        for key, gather in list(self.gathers.items()):
            self._give_up_if_hopeless(key, gather)

    def time_out(self, group: str, member: int, name: str) -> Json:
        """The answer to a member whose patience ended; it is withdrawn, so that a later round can start clean."""
        gather = self.gathers.get((group, name))
        missing = gather.missing if gather else []
        if gather:
            gather.values.pop(member, None)
            gather.waiting = [future for future in gather.waiting if not future.done()]
            if not gather.values:
                del self.gathers[(group, name)]
        return {"error": "timeout", "missing": missing}


class _Memory:
    """All scopes, and who is connected to which. Touched by the event loop's thread only (``members`` is also read)."""

    def __init__(self) -> None:
        self.scopes: dict[str, _State] = {}
        self.members: dict[tuple[str, str, int], str] = {}
        """(scope, group, member) -> the machine that it has named."""

    def scope(self, name: str) -> _State:
        return self.scopes.setdefault(name, _State())

    def lose(self, machine: str, how: str) -> None:
        """The machine is silent: its members count as gone in every scope, whatever TCP still believes."""
        for key in [key for key, named in self.members.items() if named == machine]:
            self.depart(key, how)

    def depart(self, key: tuple[str, str, int], how: str) -> None:
        if self.members.pop(key, None) is not None:  # else it was lost already
            state = self.scope(key[0])
            state.gone[key[1:]] = how
            state.review()


class StoreServer:
    """Host the store on ``host:port`` (0 picks a free port) from a thread of this process.

    Raises ClusterError when the address cannot be bound, naming it.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._memory = _Memory()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fleet_train store", daemon=True)
        self._bound = threading.Event()
        self._bind_error: OSError | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Event | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> StoreServer:
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
        """The members of ``group`` that are connected now (a racy reading)."""
        return {member for s, g, member in list(self._memory.members) if (s, g) == (scope, group)}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._bound.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        try:
            server = await asyncio.start_server(self._on_connection, self.host, self.port, limit=FRAME_LIMIT_BYTES)
        except OSError as error:
            self._bind_error = error
            return
        self.port = server.sockets[0].getsockname()[1]
        self._bound.set()
        await self._stopping.wait()
        server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            keep_alive(writer.get_extra_info("socket"))
            await _Connection(self._memory, reader, writer).serve()
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            writer.close()


class _Connection:
    """One client's side of the conversation: a request, its answer, the next request."""

    def __init__(self, memory: _Memory, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._memory = memory
        self._reader = reader
        self._writer = writer
        self._scope = ""
        self._group = ""
        self._member = -1
        self._machine = ""
        self._watched = False
        self._silence_seconds: float | None = None

    @property
    def _state(self) -> _State:
        return self._memory.scope(self._scope)

    @property
    def _key(self) -> tuple[str, str, int]:
        return self._scope, self._group, self._member

    async def serve(self) -> None:
        try:
            while line := await asyncio.wait_for(self._reader.readline(), self._silence_seconds):
                reply = await self._reply(json.loads(line))
                self._writer.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
                await self._writer.drain()
        except asyncio.TimeoutError:  # ours, or TCP's own
            if self._silence_seconds is not None:
                self._memory.lose(self._machine, f"not heard of for {self._silence_seconds:g} s")
        except (OSError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError):
            pass  # a broken connection, or a stranger who does not speak this protocol
        finally:
            if self._watched:
                self._depart("its connection broke")

    def _depart(self, how: str) -> None:
        self._watched = False
        self._memory.depart(self._key, how)

    async def _reply(self, request: Json) -> Json:
        state = self._state
        match request["do"]:
            case "hello":
                return self._hello(request)
            case "set":
                state.values[request["key"]] = request["value"]
            case "get":
                return {"value": state.values.get(request["key"])}
            case "gather":
                return await self._gather(request)
            case "fail":
                if state.failure is None:
                    state.failure = request["value"]
                    state.review()
            case "failure":
                return {"value": state.failure}
            case "gone":
                return {"value": [[m, how] for (g, m), how in state.gone.items() if g == request["group"]]}
            case "leave":
                self._depart("left")
            case "beat":
                pass
            case _:
                return {"error": "request"}
        return {"value": None}

    def _hello(self, request: Json) -> Json:
        self._scope, self._group, self._member = request["scope"], request["group"], request["member"]
        self._watched = request["watched"]
        if self._watched:
            if self._key in self._memory.members:
                self._watched = False
                return {"error": "twice"}
            self._machine = request["machine"]
            self._memory.members[self._key] = self._machine
            self._state.gone.pop((self._group, self._member), None)
            self._silence_seconds = request["silence"]
        return {"value": None}

    async def _gather(self, request: Json) -> Json:
        future = self._state.arrive(self._group, self._member, request)
        # The client's connection is read while it waits: a member that dies in a gather is noticed at once.
        end_of_input = asyncio.ensure_future(self._reader.read(1))
        done, _ = await asyncio.wait(
            {future, end_of_input}, timeout=request["timeout"], return_when=asyncio.FIRST_COMPLETED
        )
        if future in done:
            end_of_input.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await end_of_input
            return future.result()
        if end_of_input in done:
            raise OSError("the client closed its connection while it waited")
        end_of_input.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await end_of_input
        future.cancel()
        return self._state.time_out(self._group, self._member, request["name"])
