"""Simulated ranks: event-driven clients that speak the real protocol, thousands in one process.

python tools/control_plane/stand_ins.py '{"ports": [...], "ranks_per_node": 8, "barriers": 50}'
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fleet_train.cluster.store.access import Access, Caller
from fleet_train.cluster.store.wire import (
    Decoder,
    Header,
    encode,
    pack,
    pack_times,
    parse,
    raise_descriptor_limit,
)

_AT_ONCE = 200
_TIMEOUT = 120.0
_TIMES = (1, 23.45, 0.21)


class StandIn(asyncio.Protocol):
    """One rank: it joins, then sends requests and counts the answers."""

    def __init__(self, rank: int, all_ranks: AllRanks) -> None:
        self.rank = rank
        self._all_ranks = all_ranks
        self._decoder = Decoder()
        identity = {"namespace": "0", "group": "rank", "member": rank, "watched": True, "machine": "", "silence": None}
        self._caller = Caller(Access("bench"), identity)
        self._is_welcome = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for head, body in self._decoder.feed(data):
            if not self._is_welcome:
                word = self._caller.heard(parse(head))
                self._is_welcome = word is None
                if word is not None and self.transport is not None:
                    self.transport.write(encode(word))
                    continue
            elif b'"error"' in head:
                self._all_ranks.failed.append((time.monotonic(), (head + b" " + body).decode()))
            self._all_ranks.answered()

    def connection_lost(self, _: Exception | None) -> None:
        if self in self._all_ranks.ranks:
            self._all_ranks.answered()


class AllRanks:
    """All simulated ranks of this process."""

    def __init__(self) -> None:
        self.ranks: list[StandIn] = []
        self.failed: list[tuple[float, str]] = []
        self._left = 0
        self._done = asyncio.Event()

    def expect(self, count: int) -> None:
        self._left = count
        self._done.clear()

    def answered(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._done.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self._done.wait(), _TIMEOUT)

    async def connect(self, ports: list[int]) -> None:
        loop = asyncio.get_running_loop()
        self.expect(len(ports))
        turn = asyncio.Semaphore(_AT_ONCE)

        async def one(rank: int, port: int) -> None:
            async with turn:
                _, rank_ = await loop.create_connection(lambda: StandIn(rank, self), "127.0.0.1", port)
                self.ranks.append(rank_)

        await asyncio.gather(*(one(rank, port) for rank, port in enumerate(ports)))
        await self.wait()

    async def exchange(self, header: Header, body: bytes = b"", size: int = 0) -> float:
        """All enter one barrier (of ``size`` ranks, if some are missing); returns its duration."""
        self.expect(len(self.ranks))
        count = size or len(self.ranks)
        header = {**header, "count": count, "timeout": 100}
        is_step = header["do"] == "barrier"
        frames = [
            encode(header, pack_times(rank.rank, _TIMES) if is_step else pack({body: 1 << rank.rank}))
            for rank in self.ranks
        ]
        began = time.perf_counter()
        for rank, frame in zip(self.ranks, frames, strict=True):
            assert rank.transport is not None
            rank.transport.write(frame)
        await self.wait()
        return time.perf_counter() - began


async def wait_for_the_lost(all_ranks: AllRanks, ports: list[int], lost: set[int]) -> None:
    """All ranks but one node's enter a barrier; reports when the last of them got its error, and the error's text."""
    await all_ranks.connect(ports)
    all_ranks.ranks = [rank for rank in all_ranks.ranks if rank.rank not in lost]
    barrier = asyncio.ensure_future(all_ranks.exchange({"do": "barrier", "name": "step"}, size=len(ports)))
    await asyncio.sleep(2)
    say({"waiting": len(all_ranks.ranks)})
    await barrier
    at, words = max(all_ranks.failed)
    print(json.dumps({"at": at, "told": len(all_ranks.failed), "words": words}), flush=True)


async def run(asked: dict[str, Any]) -> None:
    raise_descriptor_limit(19000)
    ports = asked["ports"]
    all_ranks = AllRanks()
    if "lost" in asked:
        await wait_for_the_lost(all_ranks, ports, set(asked["lost"]))
        return
    began = time.perf_counter()
    await all_ranks.connect(ports)
    say({"connected_seconds": time.perf_counter() - began})
    endpoints = json.dumps(",".join(f"10.0.{i // 250}.{i % 250}:6170" for i in range(len(ports)))).encode()
    await all_ranks.exchange({"do": "compare", "name": "join"}, endpoints)
    await all_ranks.exchange({"do": "all_gather", "name": "port"}, b"6170")
    await all_ranks.exchange({"do": "barrier", "name": "formed"})
    say({"joined_seconds": time.perf_counter() - began})
    barriers = asked["barriers"]
    note: Header = {"do": "barrier", "slowest": 23.45, "stop": None}
    warm_up = [await all_ranks.exchange({**note, "name": f"warm-up {i}"}) for i in range(3)]
    say({"warm_up": warm_up})
    seconds = [await all_ranks.exchange({**note, "name": f"step {i}"}) for i in range(barriers)]
    say({"barrier_seconds": statistics.median(seconds), "failed": len(all_ranks.failed)})


def say(facts: dict[str, Any]) -> None:
    """Print one line, then wait until the reader asks for the next part."""
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
