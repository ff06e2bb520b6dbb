"""A process with one server of the store, or with many relays on one event loop.

    python tools/control_plane/servers.py '{"first": 1, "nodes": 64, "ranks_per_node": 8, "root": 4001, ...}'

It prints the ports of its servers as JSON, then answers each line of input with its resource usage so far.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fleet_train.cluster.store.access import Access, Callers
from fleet_train.cluster.store.relay import Parent
from fleet_train.cluster.store.server import Session, StoreServer
from fleet_train.cluster.store.wire import raise_descriptor_limit
from tools.control_plane.tree import Job

HOST = "127.0.0.1"


class Counted:
    """Bytes sent by all sessions of this process."""

    def __init__(self) -> None:
        self.bytes = 0
        send = Session.send

        def counting(session: Session, frame: bytes) -> None:
            self.bytes += len(frame)
            send(session, frame)

        Session.send = counting  # type: ignore


async def serve(asked: dict[str, Any]) -> None:
    raise_descriptor_limit(19000)
    counted = Counted()
    job = Job(asked["nodes"], asked["ranks_per_node"])
    ports: dict[int, int] = {int(node): port for node, port in asked["ports"].items()}
    listening = []  # keep a reference: an unreferenced server is closed
    for node in range(asked["first"], asked["last"] + 1):
        server = StoreServer(HOST, 0, Access("bench"), Callers([HOST]))
        listening.append(await server.listen())
        if node == 0:
            server.root("0")
        else:
            parent = Parent(
                HOST, ports[job.parent(node)], "0", node, f"node {node}", job.below(node), Access("bench"),
                asked["silence"],
            )  # fmt: skip
            await asyncio.to_thread(server.open_relay, parent, 60.0)
        ports[node] = server.port
    print(json.dumps(ports), flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps({"cpu_seconds": time.process_time(), "bytes": counted.bytes}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
