"""LocalSGD in a converted program: the averaging that a step ends with, and one that overlaps the next steps.

With an overlap, the values at the end of a period are sent. A fixed number of steps later, the same on every rank, each
rank adds the new agreed values minus what it sent: its own progress since then is kept. Source: the delayed averaging
of Overlap-Local-SGD (Wang, Liang and Joshi 2020) and of Streaming DiLoCo (Douillard et al. 2025).

`RankAveraging` decides when, with the barriers; `ParameterAverager` says what the ranks send and what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from fleet_train.cluster.flight.ring import recorder
from fleet_train.collectives.engine import HAND_OVER, CallContext, HostCopy, Running, Stages
from fleet_train.collectives.fragments import Fragment, add, cut, flats, joined, parted, write
from fleet_train.collectives.job import Job, Passed
from fleet_train.collectives.methods.dense import Allreduce, Remembers, without_cast
from fleet_train.collectives.methods.quantised import QuantisedSums
from fleet_train.collectives.replica_check import ReplicaCheck
from fleet_train.collectives.step_barrier import StepBarrier
from fleet_train.plan import Bucket, CommPlan
from fleet_train.plan.build import LocalSgdSchedule
from fleet_train.plan.pricing import averaging_bytes
from fleet_train.profile import Profile

T = TypeVar("T")


@dataclass(frozen=True)
class Correction:
    """What a rank adds to its values; ``agreed``: the new common parameters, equal bits on every rank. As `flats`."""

    parameters: list[Any]
    statistics: list[Any]
    agreed: list[Any]


@dataclass(frozen=True)
class Underway:
    """An averaging that has started and has not been applied yet."""

    barrier: Future[Passed]
    correction: Running[Correction]
    fragment: Fragment


class RankAveraging:
    """Carries out the averagings of one program's parameters. All ranks call everything in the same order."""

    def __init__(
        self,
        averager: ParameterAverager,
        job: Job,
        plan: CommPlan,
        profile: Profile,
        barrier: StepBarrier,
        check: ReplicaCheck,
    ) -> None:
        assert plan.averaging is not None
        self.averager = averager
        self._job = job
        self._values, self._statistics = plan.averaging.values, plan.averaging.statistics
        self._timeout_seconds = profile.collective_timeout_seconds
        self._barrier = barrier
        self._check = check
        self._sent_bytes = [sent[job.cluster.rank] for sent in averaging_bytes(plan)]
        self._underway: Underway | None = None
        self._overlapped_steps = 0

    def after_update(self, step: int, held: HeldValues, names: Sequence[str], loss: Any) -> None:
        """Called after the update of every step, with the new values: averages them if a period ends.

        ``names``: of all parameters.
        """
        moment = self._barrier.moment(step)
        schedule = self.averager.schedule
        if schedule.is_synchronous(step):
            self.averager.after_synchronous_step(step, held)
            self._check.after_step(moment, names, held.parameters, first=step == 1)
        elif (due := schedule.count()) is not None:
            self._job.clock.add_sent(self._sent_bytes[due])
            fragment = self.averager.fragments[due]
            own = self.averager.held_of(fragment, held)
            if self.averager.overlap_steps:
                self._begin(fragment, own, step)
            else:
                self._run("averaging", step, self.averager.average(fragment, own, loss))
                self._check.after_step(moment, fragment.choose(names), own.parameters)
        elif self._underway is not None:
            self._overlapped_steps += 1
            if self._overlapped_steps >= self.averager.overlap_steps:
                fragment = self._underway.fragment
                self._check.after_step(moment, fragment.choose(names), self.apply_pending(held))

    def apply_pending(self, held: HeldValues) -> list[Any]:
        """Wait for the averaging under way and add its correction; returns the agreed values, in their shapes.

        ``held``: everything that is averaged. If no averaging is under way, nothing is changed or returned.
        """
        if self._underway is None:
            return []
        underway, self._underway = self._underway, None
        with self._job.clock.exposed(), recorder.event("wait", "averaging"):
            correction = underway.correction.result()
        self._barrier.passed(underway.barrier)
        own = self.averager.held_of(underway.fragment, held)
        add(own.parameters, correction.parameters)
        add(own.statistics, correction.statistics)
        return cut(correction.agreed, own.parameters)

    def synchronise(self, tensors: Mapping[str, Any], step: int) -> None:
        """Make tensors equal on all ranks now, in the middle of a period or not; in place, by their variables' names.

        ``tensors``: parameters and statistics, all of them, and the chosen optimizer state. An averaging under way is
        applied first.
        """
        parameters, statistics = ([tensors[value.name] for value in each] for each in (self._values, self._statistics))
        self.apply_pending(HeldValues(parameters, statistics, []))
        self._run("synchronisation", step, self.averager.mean(list(tensors.values())))

    def drop(self) -> None:
        """Discard an averaging under way, on all ranks: other state is being loaded, or a training begins anew."""
        self.averager.drain_copies()  # now, with the previous schedule
        if self._underway is not None:
            self._underway.correction.result()
            self._barrier.passed(self._underway.barrier)
            self._underway = None

    def _begin(self, fragment: Fragment, own: HeldValues, step: int) -> None:
        """Start an averaging of copies, made on the computing thread before the next step changes the values."""
        sent = flats(own.parameters), flats(own.statistics)
        barrier, running = self._start("averaging", step, _correct(fragment, *sent, self.averager.rate()))
        self._underway = Underway(barrier, running, fragment)
        self._overlapped_steps = 0
        self.averager.schedule.begin_period()

    def _start(self, what: str, step: int, stages: Stages[T]) -> tuple[Future[Passed], Running[T]]:
        moment = f"{what} after {self._barrier.moment(step)}"
        barrier = self._barrier.begin(f"{moment} {self._job.count(moment)}", step)
        context = CallContext(moment, moment, self._timeout_seconds, what)
        with self._job.clock.exposed():  # where the computing thread is at the barrier itself
            return barrier, self._job.engine.start(stages, context, barrier=barrier)

    def _run(self, what: str, step: int, stages: Stages[Any]) -> None:
        barrier, running = self._start(what, step, stages)
        with self._job.clock.exposed(), recorder.event("wait", what):
            running.result()
        self._barrier.passed(barrier)


def _correct(fragment: Fragment, parameters: list[Any], statistics: list[Any], rate: float) -> Stages[Correction]:
    """Average the sent values, as `flats`; ``rate``: the learning rate of the step that they are from."""
    yield HAND_OVER
    own = parameters if fragment.keeps_anchor else _copies(parameters)
    agreed, means = yield from fragment.agree(own, rate, _copies(statistics))
    return Correction(_less(agreed, parameters), _less(means, statistics), agreed)


def _copies(buffers: list[Any]) -> list[Any]:
    return [buffer.clone() for buffer in buffers]


def _less(buffers: list[Any], others: list[Any]) -> list[Any]:
    return [buffer - other for buffer, other in zip(buffers, others, strict=True)]


@dataclass
class HeldValues:
    """What LocalSGD averages of one rank: the program's values, or eager tensors over the memory of the scope's
    variables."""

    parameters: list[Any]
    statistics: list[Any]
    """Batch-norm statistics: always plainly averaged, whatever is done with the parameters."""
    accumulators: list[Any]
    """The optimizer's state of floating dtype; empty unless the profile averages or resets it."""

    @property
    def all(self) -> list[Any]:
        return [*self.parameters, *self.statistics, *self.accumulators]

    def with_tensors(self, tensors: Sequence[Any]) -> HeldValues:
        """Group other ``tensors``, which are in the order of ``all``, as these values are."""
        first, second = len(self.parameters), len(self.parameters) + len(self.statistics)
        return HeldValues(list(tensors[:first]), list(tensors[first:second]), list(tensors[second : len(self.all)]))


class ParameterAverager:
    """Averages parameters over all ranks on schedule, all of them or a fragment at a time.

    ``rate``: the inner optimizer's learning rate; ``later``: copies a device value that the host reads later.
    """

    def __init__(
        self,
        profile: Profile,
        plan: CommPlan,
        allreduce: Allreduce,
        sums: QuantisedSums | None,
        rate: Callable[[], float],
        later: Callable[[Any], HostCopy],
    ) -> None:
        assert plan.averaging is not None
        self.schedule = LocalSgdSchedule.of(profile)
        self.overlap_steps = profile.local_sgd_overlap_steps
        self._profile = profile
        self._values = plan.averaging.values
        self._allreduce = without_cast(allreduce)
        self._world_size = plan.world_size
        self.rate = rate
        self._later = later
        self._pending_loss: tuple[HostCopy, float] | None = None
        self.fragments = [
            Fragment(profile, plan.averaging, index, plan.world_size, self._allreduce, sums)
            for index in range(len(plan.averaging.parts))
        ]

    @property
    def keeps_anchor(self) -> bool:
        """Whether a copy of the last agreed values is kept: only if differences are sent or get momentum."""
        return self.fragments[0].keeps_anchor

    @property
    def memories(self) -> list[tuple[Bucket, Remembers]]:
        """The rounding errors of averagings."""
        return [memory for fragment in self.fragments for memory in fragment.memories]

    @property
    def anchor(self) -> list[Any] | None:
        """The last agreed values of all parameters, as `flats`; None before the first."""
        anchors = [fragment.anchor for fragment in self.fragments if fragment.anchor is not None]
        return joined(self.fragments, anchors) if anchors else None

    @property
    def velocity(self) -> list[Any] | None:
        """The outer momentum of all parameters, as `flats`; None before the first."""
        if all(fragment.velocity is None for fragment in self.fragments):
            return None
        return joined(self.fragments, [fragment.velocity or fragment.zeros() for fragment in self.fragments])

    def restore(self, anchor: list[Any] | None, velocity: list[Any] | None) -> None:
        """Continue from a saved ``anchor`` and ``velocity``."""
        nothing: list[None] = [None] * len(self.fragments)
        anchors = nothing if anchor is None else parted(self.fragments, anchor, self._values)
        velocities = nothing if velocity is None else parted(self.fragments, velocity, self._values)
        for fragment, own, momentum in zip(self.fragments, anchors, velocities, strict=True):
            fragment.anchor, fragment.velocity = own, momentum

    def before_update(self, parameters: Sequence[Any]) -> None:
        """Store the start values, which are the same on all ranks."""
        if self.keeps_anchor and self.fragments[0].anchor is None:
            self._remember(parameters)

    def after_synchronous_step(self, step: int, held: HeldValues) -> None:
        """The last warm-up step ends with equal parameters: local training starts from them."""
        if step == self.schedule.warm_steps:
            self._remember(held.parameters)

    def average(self, fragment: Fragment, held: HeldValues, loss: Any) -> Stages[None]:
        """Make a fragment's parameters equal on all ranks and continue the period.

        ``held``: the fragment's, see `held_of`.
        """
        yield HAND_OVER
        sent, rate = flats(held.parameters), self.rate()
        others = flats(held.statistics)
        losses = [loss.cast("float32").reshape([-1]).clone()] if self.schedule.kind == "adaptive" else []
        more = self._profile.local_sgd_momentum == "average" and bool(held.accumulators)
        agreed, means = yield from fragment.agree(sent, rate, [*others, *losses], more)
        write(held.parameters, agreed)
        write(held.statistics, means[: len(others)])
        if more:
            yield from self._mean(held.accumulators)
        elif self._profile.local_sgd_momentum == "reset":
            for tensor in held.accumulators:
                tensor.zero_()
        self.schedule.begin_period()
        if losses:
            self._pending_loss = self._later(means[-1].mean()), rate

    def held_of(self, fragment: Fragment, held: HeldValues) -> HeldValues:
        """What is averaged with a fragment: its parameters, and with the last one everything else."""
        if len(self.fragments) == 1:
            return held
        statistics = held.statistics if fragment.is_last else []
        return HeldValues(fragment.choose(held.parameters), statistics, [])

    def drain_copies(self) -> None:
        """Read what the last averaging copied to the host: before a step counts, and before state is saved."""
        if self._pending_loss is not None:
            (loss, rate), self._pending_loss = self._pending_loss, None
            self.schedule.adapt(rate, loss.read().item())

    def mean(self, tensors: Sequence[Any]) -> Stages[None]:
        """Replace tensors by their mean over all ranks, in place."""
        yield HAND_OVER
        yield from self._mean(tensors)

    def _mean(self, tensors: Sequence[Any]) -> Stages[None]:
        buffers = flats(tensors)
        means = yield from self._allreduce.sum(buffers, divide_by=self._world_size)
        write(tensors, means)

    def _remember(self, parameters: Sequence[Any]) -> None:
        for fragment in self.fragments:
            fragment.remember(parameters)
