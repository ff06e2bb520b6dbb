"""Ranks without a store: a job whose other ranks always agree with this one, and ranks that are threads of the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fleet_train.cluster.store.client import StepAnswer, StepNote, Variants
from fleet_train.collectives.job import Job, Passed
from fleet_train.errors import FleetTrainError


class AgreeingJob(Job):
    """Replaces the store's part of a job. ``met`` is called with the name of every synchronization point."""

    slowest_ms: float | None = 1.0
    """What step barriers answer about the slowest rank's step. Not from the note: ranks that are played one after the
    other must get the same answer."""
    _barriers = 0
    _sums = (0.0, 0.0, 0.0)

    def met(self, name: str) -> None:
        """Overridden by observers."""

    def barrier(self, name: str, timeout_seconds: float | None = None) -> None:
        del timeout_seconds
        self.sync_points += 1
        self.met(name)

    def all_gather(self, name: str, value: Any, timeout_seconds: float | None = None) -> dict[int, Any]:
        self.barrier(name, timeout_seconds)
        return dict.fromkeys(range(self.world_size), value)

    def broadcast(self, name: str, value: Any, source: int = 0, timeout_seconds: float | None = None) -> Any:
        del source
        self.barrier(name, timeout_seconds)
        return value

    def compare(self, name: str, value: Any, timeout_seconds: float | None = None) -> Variants:
        del value
        self.barrier(name, timeout_seconds)
        return []

    def step_barrier(self, name: str, timeout_seconds: float, note: StepNote | None = None) -> Passed:
        del timeout_seconds
        self.met(f"barrier {name}")
        note = note or StepNote(0, 0.0, 0.0)
        self._barriers += 1
        steps, busy, wait = self._sums
        self._sums = (steps + note.steps, busy + note.busy_ms, wait + note.wait_ms)
        return Passed(StepAnswer(self.slowest_ms if note.steps else None, None, self._barriers), 0.0)

    def _times_up_to(self, barrier: int) -> dict[int, list[float]]:
        del barrier
        return {rank: list(self._sums) for rank in range(self.world_size)}


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
