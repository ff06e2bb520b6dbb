"""Measures steps: speed, duration, and the share of time spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class Speed(NamedTuple):
    """Of the steps since the last reading."""

    samples_per_second: float
    """Over all ranks."""
    step_ms: float
    """The time of an update: with gradient merge, of all its micro-batches."""
    data_wait_share: float
    """0 = data was always ready, 1 = only waiting."""


class StepMeter(Generic[Item]):
    """Counts batches and samples of one rank between two readings; all ranks have the same number of both.

    ``batches_per_step``: those that a rank takes for one update; above 1 with gradient merge.
    """

    def __init__(
        self, world_size: int, clock: Callable[[], float] = time.perf_counter, *, batches_per_step: int = 1
    ) -> None:
        self._world_size = world_size
        self._batches_per_step = batches_per_step
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now and reset the counts."""
        self._began = self._clock()
        self.batches = 0
        self._samples = 0
        self._waited = 0.0

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches; the time to get each one counts as waiting."""
        source = iter(batches)
        while True:
            asked = self._clock()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._waited += self._clock() - asked
            yield batch

    def count(self, samples: int) -> None:
        """Count one finished batch of this rank with this many samples."""
        self.batches += 1
        self._samples += samples

    def read(self) -> Speed:
        """The speed since the interval began; does not end it."""
        seconds = max(self._clock() - self._began, 1e-9)
        return Speed(
            self._samples * self._world_size / seconds,
            1000.0 * seconds * self._batches_per_step / max(1, self.batches),
            min(1.0, self._waited / seconds),
        )
