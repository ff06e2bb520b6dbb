"""When the runs of a program need and launch their buckets: measured on the computing thread, in a few steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from fleet_train.plan.order import BucketTimes

_SKIPPED, _MEASURED = 2, 3
"""Steps that are not measured, while everything is new, and steps that are."""


class Stopwatch:
    """The times of one program's buckets. Its clock stands while the thread waits for a bucket."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._origin = self._waited = 0.0
        self._needed: dict[int, float] = {}
        self._launched: dict[int, float] = {}
        self._runs: list[tuple[list[float], list[float]]] = []
        self._skipped = 0

    def waits(self, index: int, began: float, ended: float) -> None:
        """A bucket was waited for: seconds of ``time.perf_counter``."""
        self._needed[index] = began - self._origin - self._waited
        self._waited += ended - began

    def launches(self, index: int) -> None:
        """A bucket is launched."""
        now = time.perf_counter()
        self._launched[index] = now - self._origin - self._waited
        if len(self._launched) == self._buckets:
            self._end_run()
            self._origin, self._waited = now, 0.0

    def begin_anew(self) -> None:
        """What follows is not the run after the last one."""
        self._needed.clear()

    def _end_run(self) -> None:
        if len(self._needed) == self._buckets and len(self._runs) < _MEASURED:
            self._skipped += 1
            if self._skipped > _SKIPPED:
                every = range(self._buckets)
                self._runs.append(([self._needed[i] for i in every], [self._launched[i] for i in every]))
        self._needed, self._launched = {}, {}

    def own(self) -> list[list[float]]:
        """This rank's medians: when each bucket is needed, and when it is launched; empty until enough is measured."""
        if len(self._runs) < _MEASURED:
            return []
        return [[median(values) for values in zip(*each, strict=True)] for each in zip(*self._runs, strict=True)]


def slowest(of_ranks: Sequence[Sequence[Sequence[float]]]) -> BucketTimes:
    """The times of the slowest rank, for each bucket: a sum needs all of them."""
    needed, launched = (tuple(map(max, zip(*each, strict=True))) for each in zip(*of_ranks, strict=True))
    return BucketTimes(needed, launched)
