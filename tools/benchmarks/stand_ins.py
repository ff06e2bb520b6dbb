"""Processes of the benchmark of the control plane: servers and relays, stand-ins for ranks, real clients, strangers.

Servers, relays and clients are those of a job. A stand-in sends what a rank's client does, thousands of them from one
event loop, over one connection each: a rank has a second one for its step barriers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

import click

from fleet_train.cluster.cluster import below, parent_of
from fleet_train.cluster.store import wire
from fleet_train.cluster.store.access import Access, Caller, Callers, Refused
from fleet_train.cluster.store.client import StepNote, StoreClient, dial
from fleet_train.cluster.store.relay import Connection, Parent
from fleet_train.cluster.store.server import StoreServer

HOST, ACCESS, NAMESPACE = "127.0.0.1", Access("bench"), "0"
_TIMEOUT_SECONDS = 120.0
_CONNECTING_AT_ONCE = 200
_SILENT = 10_000
Work = Callable[..., Coroutine[Any, Any, None]]
Part = tuple[wire.Header, bytes]


@contextmanager
def apart(work: Work, *given: Any) -> Iterator[Pipe]:
    """Our end of the pipe of a process that runs ``work(pipe, *given)``. It is killed at the end, stopped or not,
    and ends with this process. Raises ClickException if it has ended when a word of it is waited for."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_run, args=(work, theirs, *given), daemon=True)
    process.start()
    theirs.close()
    try:
        yield pipe
    except (EOFError, BrokenPipeError):
        raise click.ClickException("a process of the benchmark has ended; its error is above") from None
    finally:
        process.kill()
        process.join()


def _run(work: Work, pipe: Pipe, *given: Any) -> None:
    with suppress(EOFError, KeyboardInterrupt):
        asyncio.run(work(pipe, *given))
        pipe.recv()


def ask(pipe: Pipe) -> Any:
    """The next word of a process that waits until it is told to go on."""
    pipe.send(None)
    return pipe.recv()


async def serve(pipe: Pipe, ranks: Sequence[range], nodes: range, ports: dict[int, int], silence: float) -> None:
    """The servers of these ``nodes``: node 0's is the root. ``ranks``: of all nodes; ``ports``: of servers elsewhere;
    ``silence``: of relays, in seconds. It says all ports and its process's id; then, each time that it is asked, its
    seconds of processor time and the bytes that it has sent."""
    wire.raise_descriptor_limit(ranks[-1].stop + 3 * len(ranks) + 256)
    sent, send = [0], Connection.send

    def counting(self: Connection, frame: bytes) -> None:
        sent[0] += len(frame)
        send(self, frame)

    Connection.send = counting  # type: ignore[method-assign]
    listening = []  # a server that nobody holds is closed
    for node in nodes:
        server = StoreServer(HOST, 0, ACCESS, Callers([HOST]), begins_namespaces=node == 0)
        listening.append(await server._accept(server._bind()))
        ports[node] = server.port
        if node == 0:
            await asyncio.to_thread(server.open_root, NAMESPACE)
        else:
            port, of_ranks = ports[parent_of(node)], below(node, ranks)
            parent = Parent(HOST, port, NAMESPACE, node, f"node {node}", of_ranks, ACCESS, silence)
            await asyncio.to_thread(server.open_relay, parent, _TIMEOUT_SECONDS)
    pipe.send((ports, os.getpid()))
    while True:
        await asyncio.to_thread(pipe.recv)
        pipe.send((time.process_time(), sent[0]))


class StandIn(Connection):
    """One rank's connection: it greets, then its crowd sends for it and counts its answers."""

    def __init__(self, rank: int, crowd: Crowd) -> None:
        super().__init__(time.monotonic, wire.MOST_BODY_BYTES)
        self.rank = rank
        self._crowd = crowd
        identity = {"namespace": NAMESPACE, "group": "rank", "member": rank, "watched": True}
        self._caller: Caller | None = Caller(ACCESS, identity | {"machine": "", "silence": None})

    def hear(self, head: bytes, body: bytes) -> None:
        if self._caller is None:
            self._crowd.answered(head, body)
        elif (word := self._caller.heard(wire.parse(head))) is not None:
            self.send(wire.encode(word))
        else:
            self._caller = None
            self._crowd.answered(b"{}", b"")

    def connection_lost(self, error: Exception | None) -> None:
        self._crowd.lost(self, error)


class Crowd:
    """The stand-ins for all ranks. Raises ConnectionError if one is lost, ValueError for answers that differ from each
    other or from what a store owes. ``ports``: of the server that each rank connects to."""

    def __init__(self, ports: Sequence[int]) -> None:
        wire.raise_descriptor_limit(len(ports) + 256)
        self.ranks = [StandIn(rank, self) for rank in range(len(ports))]
        self.ended = 0.0
        """When the last answer of a meeting came (``time.monotonic``)."""
        self._ports = ports

    def answered(self, head: bytes, body: bytes) -> None:
        self._answers.add((head, body))
        self._left -= 1
        if self._left == 0 and not self._done.done():
            self.ended = time.monotonic()
            self._done.set_result(None)

    def lost(self, one: StandIn, error: Exception | None) -> None:
        if one in self.ranks and not self._done.done():
            self._done.set_exception(ConnectionError(f"rank {one.rank} was disconnected: {error}"))

    def _expect(self) -> None:
        self._left, self._answers = len(self.ranks), set[tuple[bytes, bytes]]()
        self._done = asyncio.get_running_loop().create_future()

    async def connect(self) -> None:
        loop, turn = asyncio.get_running_loop(), asyncio.Semaphore(_CONNECTING_AT_ONCE)

        async def one(each: StandIn) -> None:
            async with turn:
                await loop.create_connection(lambda: each, HOST, self._ports[each.rank])

        self._expect()
        await asyncio.gather(*map(one, self.ranks))
        await asyncio.wait_for(self._done, _TIMEOUT_SECONDS)

    async def meet(self, do: str, name: str, said: Callable[[int], Part]) -> tuple[wire.Header, bytes, float]:
        """All arrive at once with what ``said`` gives for each rank; the answer, and seconds."""
        common = {"do": do, "name": name, "count": len(self._ports), "timeout": _TIMEOUT_SECONDS}
        parts = [(each, *said(each.rank)) for each in self.ranks]
        frames = [(each, wire.encode(common | header, body)) for each, header, body in parts]
        self._expect()
        began = time.monotonic()
        for each, frame in frames:
            each.send(frame)
        await asyncio.wait_for(self._done, _TIMEOUT_SECONDS)
        ((head, body),) = self._answers  # the same bytes for all
        return wire.parse(head), body, self.ended - began

    async def join(self) -> None:
        """What ranks ask when they join: are the facts of all the same, which port has rank 0 chosen, are all ready?"""
        await self.connect()
        facts, port = b"a digest of the facts: 32 bytes.", b"6170"
        _, same, _ = await self.meet("compare", "join", lambda rank: ({}, wire.pack({facts: 1 << rank})))
        _, told, _ = await self.meet("all_gather", "port", lambda rank: ({}, b"" if rank else wire.pack({port: 1})))
        everybody = wire.all_members(len(self._ports))
        if (wire.unpack(same), wire.unpack(told)) != ([(everybody, facts)], [(1, port)]):
            raise ValueError("the store does not answer what the ranks have said")
        await self.pass_gates("formed", 1)

    async def pass_gates(self, name: str, count: int) -> float:
        """Step barriers; the median of their seconds."""
        seconds = []
        for number in range(1, count + 1):
            header, _, took = await self.meet("barrier", f"{name} {number}", partial(_note, number))
            if header.get("slowest") != _busy_ms(len(self._ports) - 1):
                raise ValueError(f"a barrier's answer is {header}")
            seconds.append(took)
        return statistics.median(seconds)


def _busy_ms(rank: int) -> float:
    return round(23 + rank / 1e4, 4)


def _note(number: int, rank: int) -> Part:
    """A rank's report at its ``number``-th step."""
    times = wire.pack_times(rank, (number, number * _busy_ms(rank), number * 0.21))
    return {"slowest": _busy_ms(rank), "stop": None}, times


async def stand_in(pipe: Pipe, ports: Sequence[int], gates: int) -> None:
    """All ranks of a job: it says the seconds of joining, then of a gate when warm, then of a gate."""
    began = time.monotonic()
    crowd = Crowd(ports)
    await crowd.join()
    pipe.send(time.monotonic() - began)
    for name, count in (("warm-up", 3), ("step", gates)):
        pipe.recv()
        pipe.send(await crowd.pass_gates(name, count))


async def wait_for_lost(pipe: Pipe, ports: Sequence[int], lost: range) -> None:
    """All but the ``lost`` ranks stand at a barrier. It says that they do; then when the last was told that others are
    lost, how many were, and the words."""
    crowd = Crowd(ports)
    await crowd.join()
    absent, crowd.ranks = crowd.ranks[lost.start : lost.stop], [one for one in crowd.ranks if one.rank not in lost]
    meeting = asyncio.ensure_future(crowd.meet("barrier", "step", partial(_note, 1)))
    await asyncio.sleep(2)  # by then relays have told the root who is there
    pipe.send(len(absent))
    header, body, _ = await meeting
    pipe.send((crowd.ended, len(crowd.ranks), f"{header['error']}: {body.decode()}"))


async def be_a_rank(pipe: Pipe, port: int, rank: int, gates: int) -> None:
    """One of two ranks, with a job's client; it says that it is warm, then the seconds of each gate."""
    client = StoreClient.connect(f"{HOST}:{port}/{NAMESPACE}", rank, timeout_seconds=30.0, access=ACCESS)
    for name, count in (("warm-up", 100), ("step", gates)):
        seconds = []
        for number in range(count):
            began = time.perf_counter()
            client.barrier(f"{name} {number}", StepNote(1, 23.45, 0.21), 2, _TIMEOUT_SECONDS)
            seconds.append(time.perf_counter() - began)
        pipe.send(seconds)
        pipe.recv()


async def disturb(pipe: Pipe, port: int, kind: str) -> None:
    """What strangers and broken members may do; it says that it begins, and once it is asked, how often it was done."""
    wire.raise_descriptor_limit(_SILENT + 256)
    done: list[object] = []
    pipe.send(None)
    while not pipe.poll():
        with suppress(OSError, Refused):
            STRANGERS[kind](port, done)
    pipe.recv()
    pipe.send(len(done))


def _say_nothing(port: int, done: list[object]) -> None:
    if len(done) < _SILENT:
        done.append(socket.create_connection((HOST, port), timeout=10))
    else:
        time.sleep(0.02)


def _set_a_large_value(port: int, done: list[object]) -> None:
    identity = {"namespace": NAMESPACE, "group": "stranger", "member": 9, "watched": False}
    with dial(f"{HOST}:{port}", ACCESS, identity, 10.0) as sock:
        sock.sendall(wire.encode({"do": "set", "key": "large"}, bytes(60 << 20)))
        if sock.recv(1000) == wire.encode({}):  # it was taken
            done.append(None)


def _send_a_broken_header(port: int, done: list[object]) -> None:
    head = (b"[" * 4000, b"1" * 4000, b'{"a":' * 800, b"")[len(done) % 4]
    with socket.create_connection((HOST, port), timeout=10) as sock:
        sock.sendall(wire.LENGTHS.pack(4000, 0) + head)
        done.append(sock.recv(1000))


STRANGERS: dict[str, Callable[[int, list[object]], None]] = {
    "10,000 connections that say nothing": _say_nothing,
    "values of 60 MB, one after the other": _set_a_large_value,
    "nested, endless and half headers": _send_a_broken_header,
}
