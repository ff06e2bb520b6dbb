"""Decides which synchronous steps begin with a barrier: every rank gets the same answer without a message."""

from __future__ import annotations

from fleet_train.collectives.job.job import Job

# Between two barriers Gloo's own timeout of 30 s applies, so steps must be much shorter.
_QUICK_MS = 1000.0
# The first step compiles and connects; its time is reported at the second step's barrier.
_FIRST_STEPS = 2


class StepBarriers:
    """The rule of one exchange (``barrier_every_steps``).

    It uses the step number, the answer of the last barrier, and the number of other synchronization points, which are
    the same on every rank at the same point of the program. After a synchronization point (a save, an evaluation that
    gathers), it is unknown how long each rank will be busy; after another program's steps, it is unknown where each
    rank is.
    """

    def __init__(self, every_steps: int, job: Job, number: int) -> None:
        self._every = every_steps
        self._job = job
        self._number = number
        self._begun = 0
        self._sync_points = 0
        """``Job.sync_points`` at the last barrier of this exchange."""

    def take_turn(self) -> None:
        """Called when a run of this exchange's program begins."""
        self._job.take_turn(self._number)

    def is_due(self, step: int) -> bool:
        """Whether the synchronous step of this number (1, 2, ...; loaded state continues the count) has a barrier."""
        return (
            self._begun < _FIRST_STEPS
            or step % self._every == 0
            or self._job.sync_points != self._sync_points
            or self._job.notes.slowest_step_ms > _QUICK_MS
        )

    def begun(self) -> None:
        """Called when a barrier of this exchange begins."""
        self._begun += 1
        self._sync_points = self._job.sync_points
