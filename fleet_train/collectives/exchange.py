"""Carries out a plan during a step: averages gradients, with communication that overlaps the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from fleet_train.collectives import averaging as overlap
from fleet_train.collectives import replica_check
from fleet_train.collectives.averaging import Held, ParameterAverager
from fleet_train.collectives.engine import Engine, HostCopy, Place, Running, Stages
from fleet_train.collectives.fragments import Fragment
from fleet_train.collectives.job import Job, Passed
from fleet_train.collectives.methods.dense import BucketMethod, Remembers, make_allreduces
from fleet_train.collectives.methods.quantised_sum import QuantisedSums
from fleet_train.collectives.methods.registry import dtype_between_groups, make_method
from fleet_train.collectives.step_notes import Communication
from fleet_train.errors import ConversionError, DataError
from fleet_train.plan import Bucket, CommPlan
from fleet_train.plan.compressions import DgcSettings
from fleet_train.plan.pricing import averaging_bytes, traffic
from fleet_train.profile import Profile

T = TypeVar("T")

_SAME_GRADIENTS = (
    "all ranks computed the same gradient twice in a row: they read the same samples; share them: "
    "fleet_train.data.ShardedBatchSampler, paddle.io.DistributedBatchSampler, fleet.split_files, or a seed with "
    "fleet.worker_index() (docs/data.md)"
)

# Ranks whose slowest step is shorter than this reach the step barrier at the start of a step.
_EARLY_MS = 5000.0


class GradientExchange:
    """The communication of one converted program.

    The host operators call ``arrive``, ``begin``, ``launch``, ``wait`` and ``finish`` in the same order on every rank.
    The job's engine carries out what they start; buckets keep their order on each communicator.
    """

    def __init__(
        self, job: Job, plan: CommPlan, profile: Profile, rate: Callable[[], float], dgc: DgcSettings | None = None
    ) -> None:
        self._job = job
        self._plan = plan
        self._profile = profile
        between = dtype_between_groups(profile.compression)
        allreduces = make_allreduces(job, plan.communicators, plan.team_size, between)
        sums = QuantisedSums(job, plan, allreduces) if plan.is_quantised else None
        self.notices = sums.notices if sums else []
        """Notes to users about how this job carries out the plan."""
        self._methods: list[BucketMethod] = [
            make_method(bucket, job, plan, profile, allreduces[bucket.communicator], dgc, sums)
            for bucket in plan.buckets
        ]
        later = job.engine.device.to_host
        averager = ParameterAverager(profile, plan, allreduces[0], sums, rate, later) if plan.averaging else None
        self.averager = averager
        self.number = job.count("exchange")
        """The number of the conversion that this belongs to: 0, 1, ..."""
        self._barriers = StepBarriers(profile.barrier_every_steps, job, self.number)
        self.step = 0
        """Updates so far; with gradient merge, not every run of the program is an update."""
        self._updates = True
        self._steps_since_check = 0
        self._start_is_checked = False
        self._looks: list[replica_check.Look] = []
        self._is_settled = False
        self._first_gradients = replica_check.FirstGradients(job.engine.device, len(plan.buckets))
        self._boundaries = Boundaries(plan.accumulate_steps, job.engine)
        self._barrier: Future[Passed] | None = None
        rank = job.cluster.rank
        self._gradient_bytes = traffic(plan, job.cluster, warm_up=True).sent[rank]
        self._averaging_bytes = [sent[rank] for sent in averaging_bytes(plan)]
        self._descriptions = [bucket.describe() for bucket in plan.buckets]
        self._running: dict[int, Running[list[Any]]] = {}
        self._underway: overlap.Underway | None = None
        self._steps_beside = 0

    @property
    def sends_gradients(self) -> bool:
        """Whether the current run averages gradients: not between updates, and not in LocalSGD's local steps."""
        return self._updates and self._is_synchronous(self.step)

    def arrive(self) -> None:
        """Called at the start of a step that ends with an update: starts the barrier, if any, beside the computation.

        After the barrier Gloo waits for only 30 s, so this is for steps that are much shorter; all ranks have read the
        same times at the last barrier. Otherwise, and at the first step, the barrier is before the first bucket.
        """
        self._barriers.take_turn()
        if self._job.notes.slowest_step_ms < _EARLY_MS and self._has_barrier(self.step + 1):
            self._barrier = self._begin_barrier(self._moment_of(self.step + 1))

    @property
    def methods(self) -> list[tuple[Bucket, BucketMethod]]:
        """The buckets with their methods; to be read between steps."""
        return list(zip(self._plan.buckets, self._methods, strict=True))

    @property
    def memories(self) -> list[tuple[Bucket, Remembers]]:
        """Everything with its own state, and the parameters that it belongs to; to be read between steps."""
        return [*self.methods, *(self.averager.memories if self.averager is not None else [])]

    @property
    def looks_at_parameters(self) -> bool:
        """Whether ``begin`` does anything: a program that does not need it saves an operator in every step."""
        return self.averager is not None and (self.averager.keeps_anchor or self._checks_start)

    @property
    def _checks_start(self) -> bool:
        """Local steps from the start hide what the sentinel would see after a synchronous step."""
        return bool(self._profile.divergence_check_steps) and not self._is_synchronous(1)

    def begin(self, parameters: Sequence[Any]) -> None:
        """Called before the first bucket of a step, with the parameters that the step starts from."""
        self.settle()
        if self.averager is not None:
            self.averager.before_update(parameters)
        if self.step == 0 and self._checks_start:
            self._check_start(parameters)

    def launch(self, index: int, gradients: Sequence[Any], boundary: Any = None) -> None:
        """Start averaging a bucket's gradients (eager tensors, shapes as planned).

        ``boundary`` (bool [1], None for always): whether this run of the program ends with an update; the first bucket
        decides for all.
        """
        if index == 0:
            self._next_step(boundary is None or self._boundaries.ends_update(boundary))
        if index == 0 or self.sends_gradients:
            self._job.engine.step_on()
        if self._updates:
            self._first_gradients.see(gradients, self.step)
        if not self.sends_gradients:
            # The executor empties its own tensor objects after their last use; a view keeps the memory.
            self._running[index] = _done([gradient.view(gradient.shape) for gradient in gradients])
            return
        if self._barrier is not None and not self._job.engine.reads_values:
            with self._job.clock.exposed():  # the computing thread is at the barrier itself
                self._barrier.result()
        bucket = self._plan.buckets[index]
        self._running[index] = self._job.engine.start(
            self._methods[index].average(gradients),
            self._place(self._descriptions[index]),
            bucket.communicator,
            self._barrier,
        )
        if self._profile.sync_nccl_allreduce:
            with self._job.clock.exposed():
                self._running[index].result()

    def wait(self, index: int) -> list[Any]:
        """The averaged gradients of a launched bucket, in its order and shapes. Raises WorkerFailed with the ranks."""
        with self._job.clock.exposed():
            averages = self._running.pop(index).result()
        if index == len(self._plan.buckets) - 1 and self._updates:
            self._end_step()
        return averages

    def finish(self, held: Held, names: Sequence[str], loss: Any) -> None:
        """Called after the update with the new values: average parameters if a period ends, compare digests if due."""
        if not self._updates:
            return
        self._steps_since_check += 1
        averager = self.averager
        if averager is None:
            self._check(held, names, first=self.step == 1)
        elif averager.schedule.is_synchronous(self.step):
            averager.after_synchronous_step(self.step, held)
            self._check(held, names, first=self.step == 1)
        elif (due := averager.schedule.count()) is not None:
            self._job.clock.add_sent(self._averaging_bytes[due])
            self._average(averager, averager.fragments[due], held, names, loss)
        elif self._underway is not None:
            self._steps_beside += 1
            if self._steps_beside >= averager.overlap_steps:
                self._check_agreed(self._underway.fragment, self.take_in(held), names)

    def _average(
        self, averager: ParameterAverager, fragment: Fragment, held: Held, names: Sequence[str], loss: Any
    ) -> None:
        own = averager.held_of(fragment, held)
        if averager.overlap_steps:
            self._start_averaging(averager, fragment, own)
        else:
            self._run("averaging", averager.average(fragment, own, loss))
            self._check_agreed(fragment, own.parameters, names)

    def _check_agreed(self, fragment: Fragment, parameters: Sequence[Any], names: Sequence[str]) -> None:
        """Compare the ranks' agreed values of a fragment, if due; ``names``: of all parameters."""
        self._check(Held(list(parameters), [], []), fragment.choose(names))

    def take_in(self, held: Held) -> list[Any]:
        """Wait for the averaging under way and add its correction; returns the agreed values, in their shapes.

        ``held``: everything that is averaged. If no averaging is under way, nothing is changed or returned.
        """
        if self._underway is None or self.averager is None:
            return []
        underway, self._underway = self._underway, None
        with self._job.clock.exposed():
            correction = underway.correction.result()
        self._pass(underway.barrier)
        return overlap.apply(correction, self.averager.held_of(underway.fragment, held))

    def synchronise(self, tensors: Mapping[str, Any]) -> None:
        """Make tensors equal on all ranks now, in the middle of a period or not; in place, by their variables' names.

        ``tensors``: parameters and statistics, all of them, and the chosen optimizer state. An averaging under way is
        applied first.
        """
        averager, averaging = self.averager, self._plan.averaging
        if averager is None or averaging is None:
            return
        parameters, statistics = (
            [tensors[value.name] for value in values] for values in (averaging.values, averaging.statistics)
        )
        self.take_in(Held(parameters, statistics, []))
        self._run("synchronisation", averager.mean(list(tensors.values())))

    def drop_averaging(self) -> None:
        """Discard an averaging under way, on all ranks: other state is being loaded."""
        self._boundaries.forget()
        if self.averager is not None:
            self.averager.settle()  # now, with the previous schedule
        if self._underway is not None:
            self._underway.correction.result()
            self._pass(self._underway.barrier)
            self._underway = None

    def settle(self) -> None:
        """Read what the last step copied to the host: before the next step reads anything, and before state is saved.
        All ranks call it; raises ScheduleMismatch for replicas that have diverged."""
        if self._is_settled:
            return
        self._is_settled = True
        looks, self._looks = self._looks, []
        for taken in looks:
            replica_check.compare_looks(self._job, taken)
        if self.averager is not None:
            self.averager.settle()

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that this communicates for."""
        return [gradient.name for bucket in self._plan.buckets for gradient in bucket.gradients]

    @property
    def compares_saves(self) -> bool:
        """Whether the profile asks for comparisons of the replicas: then they are compared before every save, too."""
        return self._profile.divergence_check_steps > 0

    def compare_saved(self, names: Sequence[str], digests: list[int]) -> None:
        """Compare values that are about to be saved, by their digests. All ranks call it; raises ScheduleMismatch."""
        replica_check.compare_digests(self._job, f"the save after {self._moment}", names, digests)

    def communication(self) -> Communication:
        """The cost of this job's communication since the last call."""
        if self.averager is None or self._is_synchronous(max(self.step, 1)):
            return self._job.notes.read(1)
        self.averager.settle()
        return self._job.notes.read(self.averager.schedule.period)

    @property
    def _moment(self) -> str:
        return self._moment_of(self.step)

    def _moment_of(self, step: int) -> str:
        return f"step {step}" if self.number == 0 else f"step {step} of program {self.number}"

    def _is_synchronous(self, step: int) -> bool:
        return self.averager is None or self.averager.schedule.is_synchronous(step)

    def _has_barrier(self, step: int) -> bool:
        return self._is_synchronous(step) and self._barriers.is_due(step)

    def _next_step(self, updates: bool) -> None:
        self._barriers.take_turn()
        self.settle()
        self._is_settled = False
        self._updates = updates
        self.step += updates
        self._job.clock.begin_step()
        if updates and self._barrier is None and self._has_barrier(self.step):
            self._barrier = self._begin_barrier(self._moment)

    def _end_step(self) -> None:
        self._job.clock.end_step()
        if self.sends_gradients:
            self._job.clock.add_sent(self._gradient_bytes)
        if self._barrier is not None:
            self._pass(self._barrier)
            self._barrier = None

    def _begin_barrier(self, name: str) -> Future[Passed]:
        """Start a barrier beside the computation; the note has this rank's times since the last one."""
        self._barriers.begun()
        engine, note = self._job.engine, self._job.notes.own(self._first_gradients.tell(self.step))
        bound = self._profile.collective_timeout_seconds + engine.barrier_margin_seconds
        return engine.beside(lambda: self._job.step_barrier(name, bound, note))

    def _pass(self, barrier: Future[Passed]) -> None:
        """Read a barrier's answer: on the computing thread, so that every rank knows it after the same step."""
        passed = barrier.result()
        self._job.clock.add_barrier(passed.seconds)
        self._job.notes.take(passed.answer)
        if passed.answer.same_gradients:
            self._job.advise(DataError(_SAME_GRADIENTS))

    def _place(self, what: str) -> Place:
        moment = self._moment
        return Place(moment, f"{moment}, {what}", self._profile.collective_timeout_seconds)

    def _start_averaging(self, averager: ParameterAverager, fragment: Fragment, held: Held) -> None:
        sent = overlap.capture(held, averager.rate)
        barrier, running = self._start("averaging", overlap.correct(fragment, sent))
        self._underway = overlap.Underway(barrier, running, fragment)
        self._steps_beside = 0
        averager.schedule.begin_period()

    def _start(self, what: str, stages: Stages[T]) -> tuple[Future[Passed], Running[T]]:
        moment = f"{what} after {self._moment}"
        barrier = self._begin_barrier(f"{moment} {self._job.count(moment)}")
        place = Place(moment, moment, self._profile.collective_timeout_seconds)
        with self._job.clock.exposed():  # where the computing thread is at the barrier itself
            return barrier, self._job.engine.start(stages, place, barrier=barrier)

    def _run(self, what: str, stages: Stages[Any]) -> None:
        barrier, running = self._start(what, stages)
        with self._job.clock.exposed():
            running.result()
        self._pass(barrier)

    def _check(self, held: Held, names: Sequence[str], first: bool = False) -> None:
        every = self._profile.divergence_check_steps
        if every and (first or self._steps_since_check >= every):
            self._steps_since_check = 0
            self._compare(self._moment, names, held.parameters)

    def _check_start(self, parameters: Sequence[Any]) -> None:
        """Local steps hide different start values on the ranks: the first averaging mixes them."""
        averaging = self._plan.averaging
        if not self._start_is_checked and averaging is not None:
            self._start_is_checked = True
            self._compare("the start", [value.name for value in averaging.values], parameters)

    def _compare(self, moment: str, names: Sequence[str], parameters: Sequence[Any]) -> None:
        """Compare the replicas: now, or a step later where the host must not wait for the device."""
        engine = self._job.engine
        if engine.reads_values:
            with self._job.clock.exposed():
                replica_check.compare(self._job, moment, names, parameters)
        else:
            self._looks.append(replica_check.look(engine.device, moment, names, parameters))


def _done(values: list[Any]) -> Future[list[Any]]:
    future: Future[list[Any]] = Future()
    future.set_result(values)
    return future


# Tells the host, before a run's first bucket, whether a run with gradient merge ends with an update.


class Boundaries:
    """Reads the program's own count where the host may read it; otherwise counts itself and compares one run later.

    The program counts in a variable that is saved with its state. At the start and after state was loaded, the count is
    unknown: the host then reads the variable until the next update.
    """

    def __init__(self, accumulate_steps: int, engine: Engine) -> None:
        self._size = accumulate_steps
        self._engine = engine
        self._runs: int | None = None
        """Micro-batches since the last update; None if unknown."""
        self._said: tuple[bool, HostCopy] | None = None
        """The answer given for the last run, and what the program counted in it."""

    def forget(self) -> None:
        """Called when other state is loaded."""
        self._runs, self._said = None, None

    def ends_update(self, boundary: Any) -> bool:
        """Whether this run ends with an update; ``boundary``: bool [1], as counted by the program."""
        if self._engine.reads_values:
            return bool(boundary.item())
        self._compare()
        copy = self._engine.device.to_host(boundary)
        if self._runs is None:
            ends = bool(copy.read().item())
        else:
            ends = self._runs + 1 >= self._size
            self._said = ends, copy
        self._runs = 0 if ends else None if self._runs is None else self._runs + 1
        return ends

    def _compare(self) -> None:
        said, self._said = self._said, None
        if said is not None and bool(said[1].read().item()) != said[0]:
            raise ConversionError(
                "gradient merge: the program's count of micro-batches changed between two steps, so the last step was "
                "classified wrongly; load state with fleet.load_persistables or another call of fleet"
            )


# Decides which synchronous steps begin with a barrier: every rank gets the same answer without a message.


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
