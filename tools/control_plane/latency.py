"""How long a step barrier takes: two real clients in two processes, a server in a third.

    python tools/control_plane/latency.py server | member HOST:PORT RANK GATES

It measures the code of the folder in PYTHONPATH: the checkout before a change, for instance.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

try:
    from fleet_train.cluster.store.client import StepNote, StoreClient
    from fleet_train.cluster.store.server import StoreServer

    def meet(client: Any, name: str) -> None:
        client.barrier(name, StepNote(1, 23.45, 0.21), 2, 60)

except ImportError:  # a checkout in which the store was not a package yet
    from fleet_train.cluster.store_client import StoreClient  # type: ignore[import-not-found, no-redef]
    from fleet_train.cluster.store_server import StoreServer  # type: ignore[import-not-found, no-redef]

    def meet(client: Any, name: str) -> None:
        client.gather(name, [1, 23.45, 0.21], 2, 60)


def serve() -> None:
    server = StoreServer("127.0.0.1", 0).start()
    print(json.dumps({"endpoint": server.endpoint}), flush=True)
    sys.stdin.read()
    server.stop()


def member(endpoint: str, rank: int, barriers: int) -> None:
    client = StoreClient.connect(endpoint, rank, timeout_seconds=30)
    for number in range(100):
        meet(client, f"warm-up {number}")
    seconds = []
    for number in range(barriers):
        began = time.perf_counter()
        meet(client, f"step {number}")
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        quantiles = statistics.quantiles(seconds, n=20)
        told = {"median_ms": statistics.median(seconds), "p95_ms": quantiles[-1], "longest_ms": max(seconds)}
        print(json.dumps({name: 1e3 * value for name, value in told.items()}), flush=True)
    client.leave()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve()
    else:
        member(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
