"""A job without a store, whose other ranks are always in time and always send the same as this one."""

from __future__ import annotations

from typing import Any

from fleet_train.cluster.store.client import StepAnswer, StepNote, Variants
from fleet_train.collectives.job import Job, Passed


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
