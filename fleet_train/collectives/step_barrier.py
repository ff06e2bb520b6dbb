"""The barrier of a program's steps: which steps begin with one, when it starts, and what its answer says."""

from __future__ import annotations

from concurrent.futures import Future

from fleet_train import timeouts
from fleet_train.collectives.job import Job, Passed, StepArrival
from fleet_train.collectives.samples import SamplesCheck
from fleet_train.errors import DataError
from fleet_train.profile import Profile

_EARLY_BARRIER_SECONDS = 5.0
"""How long the slowest rank's step may take at most for ranks to reach the barrier at the start of a step."""

# The first step compiles and connects, and its time is reported at the second step's barrier; the third one's compares
# the first two steps' gradients.
_FIRST_STEPS = 3


class StepBarrier:
    """The barriers of one exchange, number ``number`` of the job.

    Which steps have one (``barrier_every_steps``) follows from the step number, the answer of the last barrier, and the
    number of other synchronization points, which are the same on every rank at the same point of the program: every
    rank decides alike without a message. After a synchronization point (a save, an evaluation that gathers), it is
    unknown how long each rank will be busy; after another program's steps, it is unknown where each rank is.
    """

    def __init__(self, job: Job, profile: Profile, number: int, buckets: int) -> None:
        self._job = job
        self._every = profile.barrier_every_steps
        self._timeout_seconds = profile.collective_timeout_seconds
        self._bound_seconds = self._timeout_seconds + job.engine.barrier_margin_seconds
        self._number = number
        self.training = 1
        """The number of the training that it belongs to, of those of this exchange."""
        self._begun = 0
        self._sync_points = 0
        """``Job.sync_points`` at the last barrier of this exchange."""
        self.samples = SamplesCheck(job, number, buckets)
        self.running: Future[Passed] | None = None
        """The barrier of the current step."""

    def moment(self, step: int) -> str:
        """A step's name, as all ranks know it."""
        where = [f"program {self._number}"] if self._number else []
        where += [f"training {self.training}"] if self.training > 1 else []
        return f"step {step} of {', '.join(where)}" if where else f"step {step}"

    def mark_active_program(self) -> None:
        """Called when a run of this exchange's program begins, in the scope of this training."""
        self._job.mark_active_program((self._number, self.training), self._timeout_seconds)

    def is_due(self, step: int) -> bool:
        """Whether the synchronous step of this number (1, 2, ...; loaded state continues the count) has a barrier."""
        return (
            self._begun < _FIRST_STEPS
            or step % self._every == 0
            or self._job.sync_points != self._sync_points
            or self._job.notes.slowest_step_ms > 1e3 * timeouts.QUICK_STEP_SECONDS
        )

    def arrive(self, step: int) -> None:
        """Called at the start of a synchronous step: begins its barrier, if any, while the step computes.

        After the barrier Gloo waits for only 30 s, so this is for steps that are much shorter; all ranks have read the
        same times at the last barrier. Otherwise, and at the first step, the barrier is before the first bucket.
        """
        is_early = self._job.notes.slowest_step_ms < 1e3 * _EARLY_BARRIER_SECONDS
        if is_early and self.is_due(step):
            self.running = self.begin(self.moment(step), step)
        self._job.arrival = StepArrival(self.moment(step), self.running) if is_early else None

    def before_first_bucket(self, step: int) -> None:
        """Begins the barrier of a synchronous step, if it has one that has not begun."""
        if self.running is None and self.is_due(step):
            self.running = self.begin(self.moment(step), step)

    def wait(self) -> None:
        """Wait for the step's barrier on the computing thread, where that enqueues the collectives itself."""
        if self.running is not None and not self._job.engine.reads_values:
            with self._job.clock.exposed():
                self.running.result()

    def end_step(self) -> None:
        """Called after a step's last bucket."""
        self._job.arrival = None
        if self.running is not None:
            self.passed(self.running)
            self.running = None

    def begin(self, name: str, step: int) -> Future[Passed]:
        """Start a barrier in the background; the note has this rank's times since the last one."""
        self._begun += 1
        self._sync_points = self._job.sync_points
        note = self._job.notes.own(self.samples.digest(step))
        return self._job.engine.run_in_background(lambda: self._job.step_barrier(name, self._bound_seconds, note))

    def passed(self, barrier: Future[Passed]) -> None:
        """Read a barrier's answer: on the computing thread, so that every rank knows it after the same step."""
        passed = barrier.result()
        self._job.clock.add_barrier(passed.seconds)
        self._job.notes.read_answer(passed.answer)
        if passed.answer.same_gradients:
            self._job.advise(DataError(self.samples.found()))
