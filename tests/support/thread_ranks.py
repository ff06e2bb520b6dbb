"""Ranks that are threads of the test: each has an address of its own, and what they gather is JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fleet_train.errors import FleetTrainError


class ThreadRanks:
    """Stands in for the facade, with ``ranks_per_node`` ranks on each of 127.0.0.2, 127.0.0.3, ..."""

    def __init__(self, nodes: int, ranks_per_node: int = 1) -> None:
        self.size = nodes * ranks_per_node
        self._per_node = ranks_per_node
        self._here = threading.local()
        self._barrier = threading.Barrier(self.size, timeout=20.0)
        self._told: list[Any] = [None] * self.size

    def worker_index(self) -> int:
        return int(self._here.rank)

    def is_first_worker(self) -> bool:
        return self.worker_index() == 0

    def worker_num(self) -> int:
        return self.size

    def local_rank(self) -> int:
        return self.worker_index() % self._per_node

    def node_num(self) -> int:
        return self.size // self._per_node

    def worker_endpoints(self) -> list[str]:
        return [f"127.0.0.{2 + rank // self._per_node}:{6170 + rank % self._per_node}" for rank in range(self.size)]

    def gather(self, value: Any) -> list[Any]:
        self._told[self.worker_index()] = json.loads(json.dumps(value))
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work`` returns on each rank, or the error of ours with which it ends there."""

        def on_rank(rank: int) -> Any:
            self._here.rank = rank
            try:
                return work(rank)
            except FleetTrainError as error:
                return error
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(on_rank, range(self.size)))
