"""What the ranks report to one another at step barriers: work time, wait time, requests to stop, a gradient's digest.

Each rank sends a note with a step barrier; the barrier's answer has what all must know: the longest step, and a stop.
The computing thread reads it at the same point of the same step on every rank, so all ranks then know the same. Each
rank's times stay in the store until they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fleet_train.cluster import Cluster
from fleet_train.cluster.store.client import StepAnswer, StepNote
from fleet_train.collectives.job.step_clock import StepClock


@dataclass(frozen=True)
class Communication:
    """The cost of communication since the last reading. Times are milliseconds per step, of this rank unless noted.

    The lists are by rank and equal on every rank that reads after the same step. They come from the notes of step
    barriers, so they end with the step before the last barrier; LocalSGD's with the last averaging. All are 0 if no
    barrier has taken place since the last reading.
    """

    steps: int
    exposed_ms: float
    """The executor waited: for buckets and in averagings."""
    gate_wait_ms: float
    """At step barriers, where ranks wait for one another; overlaps computing, except the part in ``exposed_ms``.
    """
    bytes_sent: float
    """Payload that this rank sent per step, as planned for the steps made."""
    local_sgd_period: int
    """Steps between two averagings now; 1 where every step is synchronous, 0 with one process."""
    rank_step_ms: list[float]
    """Each rank's own time of a step: everything except ``exposed_ms``, including its script between steps."""
    rank_wait_ms: list[float]
    """Each rank's time at step barriers. The rank that all others wait for has the least."""


class StepNotes:
    """One rank's notes. The computing thread makes the calls; ``request_stop`` may come from any thread.

    ``times_up_to``: asks the store for the sums of steps, own work and waiting (milliseconds) of each rank, up to the
    step barrier of a number.
    """

    def __init__(
        self, cluster: Cluster, clock: StepClock, times_up_to: Callable[[int], dict[int, list[float]]]
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._times_up_to = times_up_to
        self._asked: str | None = None
        self._taken = 0
        self._read: dict[int, list[float]] = {}
        self.stop: str | None = None
        """Which rank asked for a stop and why, once all ranks know it."""
        self.slowest_step_ms = math.inf
        """The slowest rank's own work per step, up to the last barrier; the same on every rank."""

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop; safe in a signal handler: it takes no lock. The first reason is kept."""
        self._asked = self._asked or reason
        if self._cluster.world_size == 1:
            self.stop = self.stop or self._said_by(0, self._asked)

    def own(self, gradients: int | None = None) -> StepNote:
        """This rank's note for its next step barrier: its times since the last one, and a digest to be compared."""
        told = self._clock.tell()
        busy, wait = round(1e3 * told.busy_seconds, 2), round(1e3 * told.barrier_seconds, 2)
        return StepNote(told.steps, busy, wait, self._asked, gradients)

    def take(self, answer: StepAnswer) -> None:
        """Read the answer that a step barrier gave to every rank."""
        self._taken = max(self._taken, answer.number)
        self.slowest_step_ms = math.inf if answer.slowest_ms is None else answer.slowest_ms
        if answer.stop is not None:
            self.stop = self.stop or self._said_by(*answer.stop)

    def read(self, local_sgd_period: int) -> Communication:
        """What was counted since the last reading; restarts the count. Asks the store, if there is one."""
        own = self._clock.read()
        before, self._read = self._read, self._times_up_to(self._taken) if self._taken else {}
        nothing, ranks = [0.0, 0.0, 0.0], range(self._cluster.world_size)
        times = [
            [now - then for now, then in zip(self._read.get(r, nothing), before.get(r, nothing), strict=True)]
            for r in ranks
        ]
        steps = max(own.steps, 1)
        return Communication(
            own.steps,
            1e3 * own.exposed_seconds / steps,
            1e3 * own.barrier_seconds / steps,
            own.sent_bytes / steps,
            local_sgd_period,
            [busy / max(count, 1) for count, busy, _ in times],
            [wait / max(count, 1) for count, _, wait in times],
        )

    def _said_by(self, rank: int, reason: str) -> str:
        return f"{self._cluster.describe(rank)}: {reason}"
