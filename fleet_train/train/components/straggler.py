"""Names the rank that the others wait for, from the times that ranks report at barriers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median


class StragglerWatch:
    """Checks each interval and reports only changes.

    A rank is a straggler when it is the slowest, and slower than `factor` times the median step of the others, in
    `intervals` consecutive intervals of at least `seconds` in total: anything shorter may be a checkpoint or temporary
    load.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        factor: float,
        intervals: int = 3,
        seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`endpoints`: host:port by rank. `factor` 0 = never report."""
        self._endpoints = endpoints
        self._factor = factor
        self._intervals = intervals
        self._seconds = seconds
        self._clock = clock
        self._suspect: int | None = None
        self._in_a_row, self._since = 0, clock()
        self._named: int | None = None

    def look(self, rank_step_ms: Sequence[float], rank_wait_ms: Sequence[float]) -> str | None:
        """One interval: each rank's own time of a step and its time at barriers, ms per step; returns the message, if
        any.

        Ranks without a report (0 ms: no barrier in the interval, as between two averagings) are ignored.
        """
        if not self._factor or len(rank_step_ms) < 2 or min(rank_step_ms) <= 0:
            return None
        rank = max(range(len(rank_step_ms)), key=lambda each: rank_step_ms[each])
        others = [each for each in range(len(rank_step_ms)) if each != rank]
        times_slower = rank_step_ms[rank] / median(rank_step_ms[each] for each in others)
        suspect = rank if times_slower > self._factor else None
        if suspect != self._suspect:
            self._suspect, self._in_a_row, self._since = suspect, 0, self._clock()
        self._in_a_row += 1
        is_lasting = self._in_a_row >= self._intervals and self._clock() - self._since >= self._seconds
        if suspect == self._named or not is_lasting:
            return None
        before, self._named = self._named, suspect
        if suspect is None:
            return f"{self._describe(before)} keeps up with the others again"
        waited = sum(rank_wait_ms[each] / (rank_wait_ms[each] + rank_step_ms[each]) for each in others) / len(others)
        return (
            f"{self._describe(suspect)} takes {times_slower:.1f}x the median step of the others; "
            f"they waited {100 * waited:.0f} % of their time for it"
        )

    def _describe(self, rank: int | None) -> str:
        return "no rank" if rank is None else f"rank {rank} ({self._endpoints[rank]})"
