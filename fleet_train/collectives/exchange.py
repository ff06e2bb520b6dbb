"""Carries out a plan during a step: averages gradients, with communication that overlaps the backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import paddle

from fleet_train.cluster.flight.ring import recorder
from fleet_train.collectives import replay
from fleet_train.collectives.averaging import HeldValues, ParameterAverager, RankAveraging
from fleet_train.collectives.bucket_times import Stopwatch
from fleet_train.collectives.engine import CallContext, Running, Stages
from fleet_train.collectives.engines import OWN, StreamEngine
from fleet_train.collectives.finite import IGNORE, SKIP, FiniteCheck, Rollback
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import BucketMethod, Remembers, make_allreduces
from fleet_train.collectives.methods.quantised import QuantisedSums
from fleet_train.collectives.methods.registry import Parts
from fleet_train.collectives.methods.rows import Lookups
from fleet_train.collectives.methods.sharded import make_owners, make_sharded, summed_in_order
from fleet_train.collectives.own_streams import OwnStreamProof
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.collectives.replica_check import ReplicaCheck, compare_digests
from fleet_train.collectives.step_barrier import StepBarrier
from fleet_train.collectives.step_notes import Communication
from fleet_train.collectives.training import Boundaries, Training, Trainings
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket, CommPlan
from fleet_train.plan.price import PAPER, TYPICAL, Paths, with_given_link
from fleet_train.plan.pricing import traffic
from fleet_train.plan.queues import QueuedBucket
from fleet_train.profile import Profile
from fleet_train.profile.knobs import AUTO
from fleet_train.profile.methods import compression_of
from fleet_train.profile.methods.rows import ROWS

UNKNOWN_ROWS = -1


@dataclass(frozen=True)
class Kept:
    """A variable of an optimizer: the ``parameter`` that it is kept for, and which of its axes has the parameter's
    rows. None: no axis, it is one number for all rows; `UNKNOWN_ROWS`: it cannot be told."""

    parameter: str
    axis: int | None


class GradientExchange:
    """The communication of one converted program.

    The host operators call ``arrive``, ``begin``, ``launch``, ``wait`` and ``finish`` in the same order on every rank.
    The job's engine carries out what they start; buckets keep their order on each communicator. Beside the buckets:
    ``barrier`` (of the step), ``averaging`` (of parameters, with LocalSGD) and ``check`` (of the replicas). What is
    remembered from step to step belongs to a `Training`: that of the scope which was entered last.
    """

    def __init__(
        self,
        job: Job,
        plan: CommPlan,
        profile: Profile,
        rate: Callable[[], float],
        lookups: Mapping[str, Lookups] | None = None,
        nonfinite: str = IGNORE,
    ) -> None:
        """``lookups``: of the embeddings' tables whose rows are sent, by parameter. ``nonfinite``: as of
        `FiniteCheck`."""
        self._job = job
        self._plan = plan
        self._profile = profile
        self._rate, self._lookups = rate, lookups or {}
        compression = compression_of(profile.compression)
        self._allreduces = make_allreduces(
            job, plan.communicators, plan.group_size, compression.wire_dtype or "float32"
        )
        self._sums = QuantisedSums(job, plan, self._allreduces) if plan.is_quantised else None
        self.notices = self._sums.notices if self._sums else []
        """Notes to users about how this job carries out the plan."""
        self._owners = make_owners(job, plan) if plan.owners else []
        self.number = job.count("exchange")
        """The number of the conversion that this belongs to: 0, 1, ..."""
        self._stream = profile.collective_stream
        self.kept: dict[str, Kept] = {}
        """The optimizer's state, by the names of its variables."""
        self.finite = FiniteCheck(job, nonfinite, lambda: self._moment)
        outlives = compression.has_error_feedback or compression.keeps_nan
        self._rollback = Rollback() if outlives and nonfinite == SKIP else None
        self.asks_all = nonfinite == SKIP and (outlives or profile.use_local_sgd)
        """Whether ranks decide with `is_spoilt` which steps are skipped: the averages of all gradients do not say."""
        if self._rollback is not None and not job.engine.reads_values:
            raise ConversionError(
                f"nonfinite: skip with compression: {profile.compression}: after a skipped step what is kept of a "
                "gradient is put back, and a device would have to be read for that; use nonfinite: error, or "
                "compression: none or bf16"
            )
        self._is_spoilt: Any = None
        self.overlaps_next_step = profile.overlap_next_step
        """Whether the averages of a run are waited for in the next one."""
        self.watch: Stopwatch | None = None
        """Is told when buckets are launched and waited for, where somebody wants to know."""
        self._trainings = Trainings(self._new_training)
        rows = self._now.rows
        whole = tuple(replace(each, sent=()) if each.index in rows else each for each in plan.buckets)
        self._gradient_bytes = traffic(replace(plan, buckets=whole), job.cluster, warm_up=True).sent[job.cluster.rank]
        self.first_parameter = plan.buckets[0].gradients[0].name
        """The name of a parameter that this communicates for: a training is where it is."""
        self._descriptions = [bucket.describe() for bucket in plan.buckets]
        self._names = [[gradient.name for gradient in bucket.gradients] for bucket in plan.buckets]
        self._labels = [f"bucket {index}" for index in range(len(plan.buckets))]
        self._running: dict[int, Running[list[Any]]] = {}
        self.launched = self.waited = 0
        """The buckets of the current run that were launched, and those that have been waited for."""
        self._sharing: dict[int, Running[None]] = {}
        """The buckets whose new parameters are on their way."""
        self._proof: OwnStreamProof | None = None
        if isinstance(job.engine, StreamEngine) and self._stream != AUTO:
            job.engine.use(self._stream)
            self._proof = OwnStreamProof(job, job.engine) if self._stream == OWN else None

    def _new_training(self) -> Training:
        """A training that remembers nothing. The groups that communicate are shared by all trainings."""
        job, plan, profile = self._job, self._plan, self._profile
        sharded = [
            make_sharded(bucket, self._owners[bucket.communicator], job, profile)
            for bucket in plan.buckets
            if self._owners
        ]
        methods: list[BucketMethod] = [
            sharded[bucket.index]
            if sharded and bucket.algorithm != ROWS
            else Parts(
                bucket, job, plan, profile, self._allreduces[bucket.communicator], self._sums, self._lookups
            ).make()
            for bucket in plan.buckets
        ]
        barrier = StepBarrier(job, profile, self.number, len(plan.buckets))
        check = ReplicaCheck(job, profile.divergence_check_steps)
        averaging = None
        if plan.averaging is not None:
            to_host = job.engine.device.to_host
            averager = ParameterAverager(profile, plan, self._allreduces[0], self._sums, self._rate, to_host)
            averaging = RankAveraging(averager, job, plan, profile, barrier, check)
        boundaries = Boundaries(plan.accumulate_steps, job.engine)
        return Training(methods, sharded, barrier, check, boundaries, averaging)

    @property
    def _now(self) -> Training:
        return self._trainings.current

    def enter(self, scope: Any) -> None:
        """Go on with the training of ``scope``: what runs from now on, is saved or loaded, has its variables there."""
        self._trainings.enter(scope)

    def has_trained_in(self, scope: Any) -> bool:
        """Whether anything is remembered of a training in ``scope``."""
        return self._trainings.has(scope)

    def begin_anew(self, scope: Any, is_inside_update: bool = False) -> None:
        """Called before a startup program runs in ``scope``: nothing is remembered there. All ranks call it.

        ``is_inside_update``: but for the sums of the micro-batches since the last update, which continues.
        """
        self.enter(scope)
        rows = self._now.rows if is_inside_update else {}
        self._trainings.forget(scope)
        with dynamic_mode(), paddle.no_grad():
            for index, each in rows.items():
                self._now.rows[index].load_state(each.state())

    @property
    def step(self) -> int:
        """Updates so far; with gradient merge, not every run of the program is an update."""
        return self._now.step

    @step.setter
    def step(self, step: int) -> None:
        self._now.step = step

    @property
    def equal_after(self) -> int | None:
        """The update after which all ranks' values were made equal from outside; later ones may let them drift."""
        return self._now.equal_after

    @equal_after.setter
    def equal_after(self, step: int) -> None:
        self._now.equal_after = step

    @property
    def barrier(self) -> StepBarrier:
        """The barrier of a step."""
        return self._now.barrier

    @property
    def check(self) -> ReplicaCheck:
        """The comparison of the replicas."""
        return self._now.check

    @property
    def averaging(self) -> RankAveraging | None:
        """LocalSGD's averaging of parameters; None without it."""
        return self._now.averaging

    def is_spoilt(self) -> Any:
        """Whether no rank is to update in this run, because a gradient of one is not finite: float32 [1], above 0 if
        so. Called after the last bucket was launched."""
        if not self._now.updates:
            return paddle.zeros([1], "float32")
        with self._job.clock.exposed():
            self._is_spoilt = self.finite.is_spoilt_somewhere()
        return self._is_spoilt

    @property
    def averager(self) -> ParameterAverager | None:
        """What LocalSGD keeps: its schedule, the last agreed values and their momentum."""
        return self._now.averager

    @property
    def sends_gradients(self) -> bool:
        """Whether the current run averages gradients: not between updates, and not in LocalSGD's local steps."""
        return self._now.updates and self._now.is_synchronous(self.step)

    @property
    def checked_step(self) -> str:
        """The next step in words, if its passes are to be computed twice and compared (``replay_check_steps``)."""
        every, step = self._profile.replay_check_steps, self.step + 1
        return self.barrier.moment(step) if every and step % every == 0 else ""

    def queued_buckets(self) -> list[QueuedBucket]:
        """The buckets with what each has to send, on this job's links."""
        network = self._job.network or with_given_link(PAPER, self._job.cluster, self._profile)
        return Paths(self._job.cluster, network, TYPICAL).queued(self._plan)

    def count_step(self) -> None:
        """Called instead of `finish` after a run whose update comes later."""
        if self._now.updates:
            self.check.count()

    @property
    def methods(self) -> list[tuple[Bucket, BucketMethod]]:
        """The buckets with their methods; to be read between steps."""
        return list(zip(self._plan.buckets, self._now.methods, strict=True))

    @property
    def memories(self) -> list[tuple[Bucket, Remembers]]:
        """Everything that has state of its own, and the parameters that it belongs to; to be read between steps."""
        return [*self.methods, *(self.averager.memories if self.averager is not None else [])]

    @property
    def reads_parameters(self) -> bool:
        """Whether ``begin`` does anything: a program that does not need it saves an operator in every step."""
        return self.averager is not None and (self.averager.keeps_anchor or self._checks_start)

    @property
    def _checks_start(self) -> bool:
        """Local steps from the start hide what the sentinel would see after a synchronous step."""
        return self.check.is_asked_for and not self._now.is_synchronous(1)

    def arrive(self) -> None:
        """Called at the start of a step that ends with an update; also by a part of the program that is run alone."""
        if not self._job.trains:
            return
        now = self._trainings.begin()
        now.barrier.mark_active_program()
        recorder.step = now.step + 1
        if now.is_synchronous(now.step + 1):
            now.barrier.arrive(now.step + 1)

    def begin(self, parameters: Sequence[Any]) -> None:
        """Called before the first bucket of a step, with the parameters that the step starts from."""
        self.drain_copies()
        if self.averager is not None:
            self.averager.before_update(parameters)
        if self.step == 0 and self._checks_start and self._plan.averaging is not None:
            self.check.at_start([value.name for value in self._plan.averaging.values], parameters)

    def launch(self, index: int, gradients: Sequence[Any], boundary: Any = None) -> None:
        """Start averaging a bucket's gradients (eager tensors, shapes as planned).

        ``boundary`` (bool [1], None for always): whether this run of the program ends with an update; the first bucket
        decides for all.
        """
        own = self._own(index, gradients)
        if replay.current is not None and replay.current.takes(self._names[index], own):
            return
        if index == 0:
            self._job.refuse_other_place(gradients[0])
            self._next_step(boundary is None or self._now.boundaries.ends_update(boundary))
        if index == 0 or self.sends_gradients:
            self._job.engine.step_on()
        if self._now.updates:
            self.barrier.samples.first_gradients.see(own, self.step)
        self.finite.see(self._names[index], own)
        if self.watch is not None:
            self.watch.launches(index)
        self.launched += 1
        is_last = self.launched == len(self._plan.buckets)
        if is_last:
            self.finite.end_step()
        if not self.sends_gradients:
            self._running[index] = _done(self._unsent(index, gradients))
            return
        self.barrier.wait()
        self._running[index] = self._job.engine.start(
            self._averages(index, gradients),
            self._context(self._descriptions[index], self._labels[index]),
            self._plan.buckets[index].communicator,
            self.barrier.running,
        )
        if self._profile.sync_nccl_allreduce:
            with self._job.clock.exposed():
                self._running[index].result()
        if is_last and self.overlaps_next_step:  # at one place for all ranks, wherever each of them updates
            self.barrier.end_step()

    def _averages(self, index: int, gradients: Sequence[Any]) -> Stages[list[Any]]:
        now = self._now
        averages = yield from now.methods[index].average(gradients)
        return now.sharded[index].owned(averages) if now.sharded and index in now.rows else averages

    def _own(self, index: int, gradients: Sequence[Any]) -> Sequence[Any]:
        """What of a bucket's operands follows from this rank's samples."""
        rows = self._now.rows
        return rows[index].without_tables(gradients) if index in rows else gradients

    def _unsent(self, index: int, gradients: Sequence[Any]) -> list[Any]:
        """The results of a bucket in a run that sends nothing."""
        now = self._now
        if index in now.rows:
            rows = now.rows[index]
            found = rows.local(gradients) if now.updates else rows.idle(gradients)
            return now.sharded[index].owned(found) if now.sharded else found
        # The executor empties its own tensor objects after their last use; a view keeps the memory.
        kept = [gradient.view(gradient.shape) for gradient in gradients]
        return now.sharded[index].owned(kept) if now.sharded else kept

    @property
    def member(self) -> int:
        """This rank's position among the owners of a sharded optimizer; 0 without one."""
        return self._owners[0].member if self._owners else 0

    @property
    def owners(self) -> int:
        """Ranks that share one copy of the optimizer's state; 0 if each has all of it."""
        return self._plan.owners

    @property
    def owners_group(self) -> Any:
        """The process group of a sharded optimizer's owners."""
        return self._owners[0].group

    def shape_of(self, parameter: str) -> tuple[int, ...]:
        """The shape of a parameter that this communicates for."""
        return next(spec.shape for bucket in self._plan.buckets for spec in bucket.gradients if spec.name == parameter)

    def rows_of(self, parameter: str) -> tuple[int, int, int]:
        """This rank's first row of a parameter that is cut, the number of its rows, and that of all rows."""
        for bucket in self._plan.buckets:
            for piece in bucket.shards[self.member]:
                spec = bucket.gradients[piece.gradient]
                if spec.name == parameter:
                    return piece.first, piece.rows, spec.shape[0]
        raise ConversionError(f"this rank owns no rows of '{parameter}'")

    def wait(self, index: int) -> list[Any]:
        """The averaged gradients of a launched bucket, in its order and shapes (with a sharded optimizer those that
        this rank owns, or their rows). Raises WorkerFailed with the ranks."""
        if replay.current is not None:
            replay.current.compare()
        began = time.perf_counter()
        with self._job.clock.exposed():
            averages = self._running.pop(index).result()
        if self.watch is not None:
            self.watch.waits(index, began, time.perf_counter())
        self.waited += 1
        is_last = self.waited == len(self._plan.buckets)
        label = self._labels[index] if recorder.step == self.step else f"{self._labels[index]} of step {self.step}"
        recorder.add("wait", label if self._now.updates else "", began, is_worth_it=is_last)
        if is_last and self._rollback is not None and self.sends_gradients and bool(self._is_spoilt.item()):
            self._rollback.undo()
        if is_last and self._now.updates and not self._owners:
            self._end_step()
        return averages

    def share(self, index: int, parameters: Sequence[Any], own: Sequence[Any]) -> None:
        """Start sending the owners' new values of a bucket's parameters into ``parameters`` of all ranks. ``own``: the
        values that this rank owns."""
        if self._now.updates:
            self._sharing[index] = self._job.engine.start(
                self._now.sharded[index].share(parameters, own),
                self._context(f"the parameters of {self._descriptions[index]}", f"parameters {index}"),
                self._plan.buckets[index].communicator,
            )

    def fill(self, indices: Sequence[int]) -> None:
        """Called after the last update of a sharded optimizer: the parameters of these buckets have their new values
        after it."""
        began = time.perf_counter()
        sharing = [self._sharing.pop(index) for index in indices if index in self._sharing]
        with self._job.clock.exposed():
            for running in sharing:
                running.result()
        if sharing and not self._sharing:
            recorder.add("wait", "parameters", began, is_worth_it=True)
            self._end_step()

    def over_owners(self, values: Any) -> Any:
        """The sum of ``values`` ([elements], a float) over the ranks that share one copy of the optimizer's state, in
        their order: the same bits on all of them. Zeros in runs without an update, which send nothing."""
        if not self.sends_gradients:
            return paddle.zeros_like(values)
        # On the communicator's own thread: it may still be sending new parameters over the same group.
        stages, first = summed_in_order(self.owners_group, values), self._plan.buckets[0].communicator
        return self._job.engine.start(stages, self._context("a sum over the owners", "owners"), first).result()

    def _context(self, what: str, label: str = "") -> CallContext:
        seconds = self._profile.collective_timeout_seconds
        return CallContext(self._moment, f"{self._moment}, {what}", seconds, label)

    def finish(self, held: HeldValues, names: Sequence[str], loss: Any) -> None:
        """Called after the update with the new values: average parameters if a period ends, compare digests if due."""
        if not self._now.updates:
            return
        self.check.count()
        if self.averaging is None:
            self.check.after_step(self._moment, names, held.parameters, first=self.step == 1)
        else:
            self.averaging.after_update(self.step, held, names, loss)

    def drain_copies(self) -> None:
        """Read what the last step copied to the host: before the next step reads anything, and before state is saved.
        All ranks call it; raises ScheduleMismatch for replicas that have diverged."""
        self.finite.drain_copies()
        self._now.drain_copies()

    def synchronise(self, tensors: Mapping[str, Any]) -> None:
        """Make tensors equal on all ranks, as `RankAveraging.synchronise`; without LocalSGD they are equal already."""
        if self.averaging is not None:
            self.averaging.synchronise(tensors, self.step)

    def drop_averaging(self) -> None:
        """Forget what is under way, on all ranks: other state is being loaded, or a training begins anew."""
        self._now.drop_averaging()

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that this communicates for."""
        return [gradient.name for bucket in self._plan.buckets for gradient in bucket.gradients]

    def compare_saved(self, names: Sequence[str], digests: list[int]) -> None:
        """Compare values that are about to be saved, by their digests. All ranks call it; raises ScheduleMismatch."""
        compare_digests(self._job, f"the save after {self._moment}", names, digests)

    def communication(self) -> Communication:
        """The cost of this job's communication since the last call."""
        if self.averager is None or self._now.is_synchronous(max(self.step, 1)):
            return self._job.notes.read(1)
        self.averager.drain_copies()
        return self._job.notes.read(self.averager.schedule.period)

    @property
    def _moment(self) -> str:
        return self.barrier.moment(self.step)

    def _next_step(self, updates: bool) -> None:
        now = self._trainings.begin()
        now.barrier.mark_active_program()
        now.next_run(updates)
        self.launched = self.waited = 0
        recorder.step = now.step
        if updates and self._proof is not None:
            self._proof.begin_update()
        self._job.clock.begin_step()
        self.finite.drain_copies()
        self.finite.begin_step()
        if self._rollback is not None and self.sends_gradients:
            self._rollback.remember(now.methods)
        if updates and now.is_synchronous(now.step):
            now.barrier.before_first_bucket(now.step)

    def _end_step(self) -> None:
        self._job.clock.end_step()
        if self.sends_gradients:
            self._job.clock.add_sent(self._gradient_bytes + sum(rows.sent_bytes for rows in self._now.rows.values()))
        if self._proof is not None:
            self._proof.end_update()
        if not self.overlaps_next_step:
            self.barrier.end_step()


def _done(values: list[Any]) -> Future[list[Any]]:
    future: Future[list[Any]] = Future()
    future.set_result(values)
    return future
