"""Where the time of this rank's steps goes. The computing thread's, which all calls come from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Times:
    """Sums over steps, in seconds and bytes."""

    steps: int = 0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0
    gate_seconds: float = 0.0
    sent_bytes: float = 0.0


class StepClock:
    """Counts twice: what the script has not read yet, and what the other ranks have not been told yet.

    A step ends when its last bucket has been waited for; what is waited for behind that (an averaging, a comparison)
    and what the script does between steps counts to the next one.
    """

    def __init__(self) -> None:
        self._unread = Times()
        self._untold = Times()
        self._step_began: float | None = None
        self._exposed_in_step = 0.0

    def begin_step(self) -> None:
        """Only the first step needs it: every other begins where the one before has ended."""
        if self._step_began is None:
            self._step_began = time.perf_counter()

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the body as time in which the executor stands still."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._exposed_in_step += seconds
            self._unread.exposed_seconds += seconds

    def end_step(self) -> None:
        now = time.perf_counter()
        began = now if self._step_began is None else self._step_began
        self._untold.busy_seconds += now - began - self._exposed_in_step
        self._step_began, self._exposed_in_step = now, 0.0
        self._unread.steps += 1
        self._untold.steps += 1

    def add_gate(self, seconds: float) -> None:
        for times in (self._unread, self._untold):
            times.gate_seconds += seconds

    def add_sent(self, nbytes: float) -> None:
        self._unread.sent_bytes += nbytes

    def read(self) -> Times:
        """What the script has not read yet; starts anew, as the step does that is to come.

        So a script that reads before it goes on training keeps an evaluation or a save out of its steps' times.
        """
        times, self._unread = self._unread, Times()
        if self._step_began is not None:
            self._step_began, self._exposed_in_step = time.perf_counter(), 0.0
        return times

    def tell(self) -> Times:
        """What the other ranks have not been told yet; starts anew."""
        times, self._untold = self._untold, Times()
        return times
