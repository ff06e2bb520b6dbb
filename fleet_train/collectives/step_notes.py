"""What the ranks report to one another at step barriers: work time, wait time, requests to stop, a gradient's digest.

Each rank sends a note with a step barrier; the barrier's answer has what all must know: the longest step, and a stop.
The computing thread reads it at the same point of the same step on every rank, so all ranks then know the same. Each
rank's times stay in the store until they are read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fleet_train.cluster import Cluster
from fleet_train.cluster.store.client import StepAnswer, StepNote
from fleet_train.collectives.engine import Moment

_MOST_LAST_STEPS = 1000


@dataclass(frozen=True)
class Communication:
    """The cost of communication since the last reading. Times are milliseconds per step, of this rank unless noted.

    The lists are by rank and equal on every rank that reads after the same step. They come from the notes of step
    barriers, so they end with the step before the last barrier; LocalSGD's with the last averaging. All are 0 if no
    barrier has taken place since the last reading.
    """

    steps: int
    exposed_ms: float
    """Time for which the executor waited: for buckets and in averagings."""
    gate_wait_ms: float
    """Time at step barriers, where ranks wait for one another; overlaps computing, but for what is exposed."""
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
        self._stop_reason: str | None = None
        self._last_barrier = 0
        self._read: dict[int, list[float]] = {}
        self.stop: str | None = None
        """The rank that asked for a stop and why, in words, once all ranks know it; None if none has."""
        self.slowest_step_ms = math.inf
        """The slowest rank's own work per step, up to the last barrier; the same on every rank."""

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop; safe in a signal handler: it takes no lock. The first reason is kept."""
        self._stop_reason = self._stop_reason or reason
        if self._cluster.world_size == 1:
            self.stop = self.stop or self._stop_text(0, self._stop_reason)

    def forget_stop(self) -> None:
        """In a job of one process, which goes on in a notebook after its training was stopped: the next one may run."""
        if self._cluster.world_size == 1:
            self._stop_reason = self.stop = None

    def own(self, gradients: int | None = None) -> StepNote:
        """This rank's note for its next step barrier: its times since the last one, and a digest to be compared."""
        times = self._clock.read_unsent()
        busy, wait = round(1e3 * times.busy_seconds, 2), round(1e3 * times.barrier_seconds, 2)
        return StepNote(times.steps, busy, wait, self._stop_reason, gradients)

    def read_answer(self, answer: StepAnswer) -> None:
        """Read the answer that a step barrier gave to every rank."""
        self._last_barrier = max(self._last_barrier, answer.number)
        self.slowest_step_ms = math.inf if answer.slowest_ms is None else answer.slowest_ms
        if answer.stop is not None:
            self.stop = self.stop or self._stop_text(*answer.stop)

    def read(self, local_sgd_period: int) -> Communication:
        """What was counted since the last reading; restarts the count. Asks the store, if there is one."""
        own = self._clock.read()
        before, self._read = self._read, self._times_up_to(self._last_barrier) if self._last_barrier else {}
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

    def _stop_text(self, rank: int, reason: str) -> str:
        return f"{self._cluster.describe(rank)}: {reason}"


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
    """A clock that says where the time of this rank's steps goes. The computing thread makes all calls.

    Counts twice: what the script has not read yet, and what has not been sent to the other ranks yet.

    A step ends after the wait for its last bucket; later waits (an averaging, a comparison) and what the script does
    between steps count toward the next one. ``moment`` gives the current end of the calculation stream. A step is
    counted once all its points have passed: on a GPU, where the host is ahead, a step later.
    """

    def __init__(self, moment: Callable[[], Moment] = Moment) -> None:
        self._moment = moment
        self._unread = Times()
        self._unsent = Times()
        self._step: _Step | None = None
        self._ended: deque[_Step] = deque()
        self._left: list[_Span] = []
        """Exposed time of a step that was read in the middle and had not passed then."""
        self.last_ms: deque[float] = deque(maxlen=_MOST_LAST_STEPS)
        """This rank's own time of each of the last steps; whoever reads it may clear it."""

    def begin_step(self) -> None:
        """Begin the first step; every other step begins where the previous one ended."""
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
        for times in (self._unread, self._unsent):
            times.barrier_seconds += seconds

    def add_sent(self, nbytes: float) -> None:
        self._unread.sent_bytes += nbytes

    def read(self) -> Times:
        """The times that the script has not read yet; restarts the count and the current step.

        So a script that reads before it continues training keeps an evaluation or a save out of its step times.
        """
        if self._step is not None:
            self._left += self._step.exposed
            self._step = _Step(self._moment())
        self._count()
        times, self._unread = self._unread, Times()
        return times

    def read_unsent(self) -> Times:
        """The times that have not been sent to the other ranks yet; restarts the count."""
        self._count()
        times, self._unsent = self._unsent, Times()
        return times

    def _count(self) -> None:
        while self._ended and (last := self._ended[0].ended) is not None and last.has_passed():
            step = self._ended.popleft()
            exposed = _seconds(step.exposed)
            busy = last.seconds_since(step.began) - exposed
            self.last_ms.append(1e3 * busy)
            self._unsent.busy_seconds += busy
            self._unread.exposed_seconds += exposed
            self._unread.steps += 1
            self._unsent.steps += 1
        passed = [span for span in self._left if span[1].has_passed()]
        self._left = self._left[len(passed) :]
        self._unread.exposed_seconds += _seconds(passed)


def _seconds(spans: Iterable[_Span]) -> float:
    return sum(until.seconds_since(since) for since, until in spans)
