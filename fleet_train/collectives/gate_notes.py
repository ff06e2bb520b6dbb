"""What the ranks tell one another at the gates: how long they worked and waited, and whether one wants to stop.

Every gate carries a note of each rank, and its answer brings the notes of all: no message is sent for them. They are
taken in on the computing thread, at the same point of the same step on every rank, so all ranks know the same after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.collectives.step_clock import StepClock


@dataclass
class RankTimes:
    """What one rank has told since the last reading: steps, milliseconds of own work, milliseconds at gates."""

    steps: int = 0
    busy_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass(frozen=True)
class Communication:
    """What communication has cost since the last reading. Times are milliseconds per step, of this rank if not said.

    The lists are by rank and equal on every rank that reads after the same step. They come from the notes of gates,
    so they end with the step before the last gate; LocalSGD's with the last averaging.
    """

    steps: int
    exposed_ms: float
    """The executor stood still: in waits for buckets and in averagings."""
    gate_wait_ms: float
    """At gates, where ranks wait for one another; beside the computing, except for what ``exposed_ms`` has of it."""
    bytes_sent: float
    """Payload that this rank sent per step, as planned for the steps that were made."""
    local_sgd_period: int
    """Steps between two averagings now; 1 where every step is synchronous, 0 with one process."""
    rank_step_ms: list[float]
    """Each rank's own time of a step: all but ``exposed_ms``, with what its script does between steps."""
    rank_wait_ms: list[float]
    """Each rank's time at gates. The rank that all others wait for has the least."""


class GateNotes:
    """One rank's side of the conversation. The computing thread calls; ``request_stop`` may come from anywhere."""

    def __init__(self, cluster: Cluster, clock: StepClock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._asked: str | None = None
        self._times = [RankTimes() for _ in cluster.ranks]
        self.stop: str | None = None
        """Who asked for a stop and why, once all ranks know it."""
        self.slowest_step_ms = math.inf
        """Of the slowest rank's own work, per step, up to the last gate; the same on every rank."""

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop; safe in a signal handler: it takes no lock. The first reason stands."""
        self._asked = self._asked or reason
        if len(self._times) == 1:
            self.stop = self.stop or self._said_by(0, self._asked)

    def own(self) -> list[Any]:
        """This rank's note for its next gate: steps, busy and waiting milliseconds since the last, perhaps a reason."""
        told = self._clock.tell()
        note = [told.steps, round(1e3 * told.busy_seconds, 2), round(1e3 * told.gate_seconds, 2)]
        return note if self._asked is None else [*note, self._asked]

    def take(self, notes: Mapping[int, list[Any]]) -> None:
        """Take in the notes of all ranks, by rank."""
        self.slowest_step_ms = max(note[1] / note[0] if note[0] else math.inf for note in notes.values())
        for rank, (steps, busy, wait, *asked) in sorted(notes.items()):
            times = self._times[rank]
            times.steps += steps
            times.busy_ms += busy
            times.wait_ms += wait
            if asked:
                self.stop = self.stop or self._said_by(rank, asked[0])

    def read(self, local_sgd_period: int) -> Communication:
        """What was counted since the last reading; starts anew."""
        own, times = self._clock.read(), self._times
        self._times = [RankTimes() for _ in times]
        steps = max(own.steps, 1)
        return Communication(
            own.steps,
            1e3 * own.exposed_seconds / steps,
            1e3 * own.gate_seconds / steps,
            own.sent_bytes / steps,
            local_sgd_period,
            [each.busy_ms / max(each.steps, 1) for each in times],
            [each.wait_ms / max(each.steps, 1) for each in times],
        )

    def _said_by(self, rank: int, reason: str) -> str:
        return f"{self._cluster.describe(rank)}: {reason}"
