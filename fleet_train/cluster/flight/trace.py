"""A trace: the flight recorder's events of chosen steps, kept until the last of them has ended, and then written."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fleet_train.cluster.flight.ring import RING_BYTES, merged, recorder
from fleet_train.errors import ClusterError, FleetTrainError
from fleet_train.files import publish
from fleet_train.log import logger

MOST_STEPS = 200
"""The most steps of a trace: a copy of the ring for each stays in memory until the last one has ended."""
MOST_TRACE_BYTES = (MOST_STEPS + 3) * RING_BYTES
"""The most bytes of a trace, with the copy before the first step, and the one at the end."""


def trace_name(rank: int) -> str:
    """The file of a rank's trace, which ``timeline`` reads."""
    return f"trace.{rank}.bin"


def read_steps(text: str, name: str = "--trace") -> tuple[int, int]:
    """First and last step of ``100-104`` or ``100``. Raises ClusterError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last < first + MOST_STEPS:
        raise ClusterError(
            f"{name} {text[:40]!r}: give a step, counted from 1, or the first and the last one, such as 100-104; "
            f"at most {MOST_STEPS} steps"
        )
    return first, last


class Trace:
    """The trace of this rank. ``clock``: measures this machine's clock, as `recorder.Recorder.set_clock` takes it."""

    def __init__(
        self, first: int, last: int, folder: Path, rank: int, clock: Callable[[], tuple[float, float]]
    ) -> None:
        self.data = b""
        """The bytes that were written, once the last step has ended."""
        self._first, self._last = first, last
        self._folder, self._rank = folder, rank
        self._clock = clock
        self._copies: list[bytes] = []
        self._copied = -1
        """The step of the newest copy."""
        self._traced = 0
        """The number of steps traced so far."""
        self._is_over = False

    def after_run(self) -> None:
        """Called after each run of a program: keeps the events of a traced step, and writes them after the last one."""
        step = recorder.step
        if self._is_over or step < self._first - 1 or step == self._copied:
            return
        self._copied = step
        if step <= self._last:
            self._copies.append(recorder.copy())
            self._traced += step >= self._first
        if step >= self._last:
            self.end()

    def end(self) -> None:
        """Write what was traced; the second time it does nothing."""
        if self._is_over:
            return
        self._is_over = True
        steps = f"steps {self._first}-{self._last}"
        if not self._traced:
            logger.warning(
                "rank %d traced nothing: %s were asked for, it is at step %d", self._rank, steps, recorder.step
            )
            return
        with suppress(FleetTrainError):  # the store is gone: the clock of the start has to do
            recorder.set_clock(*self._clock())
        self.data = merged([*self._copies, recorder.copy()], self._first, self._last)
        self._copies.clear()
        path = self._folder / trace_name(self._rank)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            publish(path, self.data, f"{path.name}.tmp")
        except OSError as error:
            logger.warning("%s cannot be written: %s; training goes on", path, error.strerror)
            return
        if self._rank == 0:
            logger.info("traced %s: fleet_train timeline %s", steps, self._folder)

    def of_last_step(self) -> bytes:
        """The part of ``data`` that one picture needs."""
        return merged([self.data], self._last, self._last)


current: Trace | None = None
"""The trace that was asked for last in this process; None without one."""


def begin(trace: Trace) -> None:
    global current
    current = trace
    recorder.shortest_seconds = 0.0


def after_run() -> None:
    """Tell the current trace, if there is one, that a run of a program has ended."""
    if current is not None:
        current.after_run()
