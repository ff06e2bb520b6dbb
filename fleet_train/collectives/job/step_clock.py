"""Measures where the time of this rank's steps goes. The computing thread makes all calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fleet_train.collectives.engines.device import HostMoment, Moment


@dataclass
class Times:
    """Sums over steps, in seconds and bytes."""

    steps: int = 0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0
    barrier_seconds: float = 0.0
    sent_bytes: float = 0.0


_Span = tuple[Moment, Moment]


@dataclass
class _Step:
    """Points of one step that the device may not have passed yet."""

    began: Moment
    exposed: list[_Span] = field(default_factory=list)
    ended: Moment | None = None


class StepClock:
    """Counts twice: what the script has not read yet, and what has not been sent to the other ranks yet.

    A step ends after the wait for its last bucket; later waits (an averaging, a comparison) and what the script does
    between steps count toward the next one. ``moment`` gives the current end of the calculation stream. A step is
    counted once all its points have passed: on a GPU, where the host is ahead, a step later.
    """

    def __init__(self, moment: Callable[[], Moment] = HostMoment) -> None:
        self._moment = moment
        self._unread = Times()
        self._untold = Times()
        self._step: _Step | None = None
        self._ended: deque[_Step] = deque()
        self._left: list[_Span] = []
        """Exposed time of a step that was read in the middle and had not passed then."""

    def begin_step(self) -> None:
        """Only the first step needs it: every other step begins where the previous one ended."""
        if self._step is None:
            self._step = _Step(self._moment())

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the body as time in which the executor, or its stream, waits."""
        began = self._moment()
        try:
            yield
        finally:
            if self._step is None:
                self._step = _Step(began)
            self._step.exposed.append((began, self._moment()))

    def end_step(self) -> None:
        now = self._moment()
        step, self._step = self._step or _Step(now), _Step(now)
        step.ended = now
        self._ended.append(step)
        self._count()

    def add_barrier(self, seconds: float) -> None:
        for times in (self._unread, self._untold):
            times.barrier_seconds += seconds

    def add_sent(self, nbytes: float) -> None:
        self._unread.sent_bytes += nbytes

    def read(self) -> Times:
        """What the script has not read yet; restarts the count and the current step.

        So a script that reads before it continues training keeps an evaluation or a save out of its step times.
        """
        if self._step is not None:
            self._left += self._step.exposed
            self._step = _Step(self._moment())
        self._count()
        times, self._unread = self._unread, Times()
        return times

    def tell(self) -> Times:
        """What has not been sent to the other ranks yet; restarts the count."""
        self._count()
        times, self._untold = self._untold, Times()
        return times

    def _count(self) -> None:
        while self._ended and (last := self._ended[0].ended) is not None and last.has_passed():
            step = self._ended.popleft()
            exposed = _seconds(step.exposed)
            self._untold.busy_seconds += last.seconds_since(step.began) - exposed
            self._unread.exposed_seconds += exposed
            self._unread.steps += 1
            self._untold.steps += 1
        passed = [span for span in self._left if span[1].has_passed()]
        self._left = self._left[len(passed) :]
        self._unread.exposed_seconds += _seconds(passed)


def _seconds(spans: Iterable[_Span]) -> float:
    return sum(until.seconds_since(since) for since, until in spans)
