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

from fleet_train.cluster.store_memory import Memory, ScopeState
from fleet_train.cluster.store_wire import Json, keep_alive
from fleet_train.errors import ClusterError

FRAME_LIMIT_BYTES = 64 * 2**20


class StoreServer:
    """Host the store on ``host:port`` (0 picks a free port) from a thread of this process.

    Raises ClusterError when the address cannot be bound, naming it.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._memory = Memory()
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

    def __init__(self, memory: Memory, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
    def _state(self) -> ScopeState:
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
                state.fail(request["value"])
            case "failure":
                return {"value": state.failure}
            case "failures":
                return {"value": state.failures}
            case "clock":
                return {"value": round(state.seconds, 3)}
            case "gone":
                return {"value": [[m, how] for (g, m), how in state.gone.items() if g == request["group"]]}
            case "ended":
                self._memory.end((self._scope, request["group"], request["member"]))
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
