"""The state between ``fleet.init`` and ``fleet.shutdown``, which the facade's modules share.

The job is the launcher's; for a plan without a cluster (`rehearsal`) it is imagined: the script runs up to its first
step as rank 0 of a job whose other ranks do not exist.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train.cluster.environment import asked_checks, asked_trace, is_strict, join_timeout_seconds, log_folder
from fleet_train.cluster.flight import trace
from fleet_train.cluster.flight.trace import Trace
from fleet_train.cluster.trained import note_training
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import exchanges_in, once_until_grown
from fleet_train.collectives.job import Job
from fleet_train.collectives.join import clock_of, join
from fleet_train.collectives.paddle_compat import ensured_dynamic_mode
from fleet_train.convert import process, verify
from fleet_train.convert.draws import advice_about_draws
from fleet_train.convert.foreign import refuse_foreign_fetches
from fleet_train.convert.next_step.runs import NextStep
from fleet_train.convert.optimizer import DistributedOptimizer
from fleet_train.convert.passes.exchanged import forgotten
from fleet_train.convert.passes.one_card import leave_out_host_operators
from fleet_train.convert.passes.program import script_line, updates_alone
from fleet_train.convert.passes.replayed import Replays
from fleet_train.convert.passes.skipping import of_feeds
from fleet_train.convert.program_state import held_names, missing_in_scope, statistics_of
from fleet_train.convert.role_maker import cluster_of
from fleet_train.convert.schedules import Schedules
from fleet_train.convert.shares import BatchShares
from fleet_train.errors import ConversionError, FleetTrainError, NotFinite
from fleet_train.log import log_once
from fleet_train.plan import CommPlan
from fleet_train.profile import Profile


@dataclass
class Session:
    """This process's job and its converted programs."""

    job: Job
    strategy: Any = None
    """The strategy given to ``init``; the default of ``distributed_optimizer``."""
    is_strict: bool = False
    """Whether a probable mistake of the script is an error."""
    profile: Profile | None = None
    main_program: Any = None
    startup_program: Any = None
    plans: list[CommPlan] = field(default_factory=list)
    optimizers: list[DistributedOptimizer] = field(default_factory=list)
    exchanges: list[tuple[Any, GradientExchange]] = field(default_factory=list)
    """Converted programs with their communication."""
    started: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """The scopes in which a startup program has run."""
    schedules: Schedules = field(init=False)
    next_step: NextStep | None = None
    """The runs that make the update of the run before; None if no program has such."""
    shares: BatchShares | None = None
    """The parts of the joint batch that ranks take: see `current_shares`."""
    _owners: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _feed: Any = None
    """What the last run was fed."""
    _running: tuple[GradientExchange, str] | None = None
    """The program that ran last, and where in the script."""
    _has_updated: bool = False
    """Whether an optimizer has updated in dynamic mode."""
    _has_reduced: bool = False
    """Whether the script has summed something over ranks itself."""

    def __post_init__(self) -> None:
        self.schedules = Schedules(self.job.cluster.rank, lambda error: self.advise(error))

    def on_converted(self, main: Any, startup: Any, plan: CommPlan | None, exchange: GradientExchange | None) -> None:
        self.main_program, self.startup_program = main, startup
        leave_out_host_operators(self._what_drifts)
        self.schedules.watch(main, self.profile.accumulate_steps if self.profile else 1)
        if plan is not None:
            self.plans.append(plan)
        if exchange is not None:
            self.exchanges.append((main, exchange))
            if exchange.overlaps_next_step and self.next_step is None:
                self.next_step = NextStep(self.job, self.exchanges)
                self.next_step.begin(self.is_strict)
                self.job.settle_with_others = self.next_step.flush_with_others

    def on_first_run(self, program: Any) -> None:
        """Advise about a program that trains on each rank alone. ConversionError if it needs other ranks' samples."""
        ours = {gradient.name for plan in self.plans for bucket in plan.buckets for gradient in bucket.gradients}
        where = updates_alone(program, ours)
        if (where or exchanges_in(program)) and (line := forgotten(program)):
            raise ConversionError(
                f"fleet.all_gather_samples in {line}: the program trains, and this value is that of each rank alone; "
                "call it before minimize of the optimizer that fleet.distributed_optimizer returns"
            )
        if self.shares_are_ignored and exchanges_in(program):
            self.advise(
                ConversionError(
                    f"batch_shares: {self.profile and self.profile.batch_shares}, and nobody deals by it: each rank is "
                    "fed what the script reads; feed fleet.batch_size(GLOBAL) samples, or use "
                    "fleet_train.data.ShardedBatchSampler(shares=fleet.batch_shares()), a Trainer or fleet.resumable"
                )
            )
        if exchanges_in(program) and (same := advice_about_draws(self.job, program)):
            self.advise(same)
        if not where:
            return
        ranks = self.job.world_size
        late = " (now it comes later, or minimize is called on the optimizer inside)" if self.optimizers else ""
        self.advise(
            ConversionError(
                f"{where}: updates on each rank alone, so {ranks} ranks train {ranks} models; write optimizer = "
                f"fleet.distributed_optimizer(optimizer) before it, and use that optimizer in it{late}"
            )
        )

    @property
    def shares_are_ignored(self) -> bool:
        """Whether the profile asks for unlike shares, and nothing deals by them."""
        asked = self.profile is not None and self.profile.batch_shares != "equal" and self.job.world_size > 1
        return asked and not (self.shares is not None and self.shares.is_used)

    def owner_of(self, scope: Any, exchange: GradientExchange) -> Any:
        """The scope that has the variables which a run in ``scope`` trains: itself, or the one that it was made in by
        ``new_scope()``."""
        owners, name = self._owners.setdefault(scope, {}), exchange.first_parameter
        if (known := owners.get(name, lambda: None)()) is not None:
            return known
        variable = scope.find_var(name)
        if variable is None:
            return scope
        owner = scope
        if name not in scope.local_var_names():
            others = (other for other in (*self.started, paddle.static.global_scope()) if other is not scope)
            owner = next((other for other in others if other.find_var(name) is variable), scope)
        owners[name] = weakref.ref(owner)
        return owner

    def advise(self, error: FleetTrainError) -> None:
        """Say once, on rank 0, what is probably a mistake in the script; with ``--strict`` it is an error."""
        if self.is_strict:
            raise error
        log_once([str(error)], self.job.cluster.rank)

    def on_dynamic_update(self) -> None:
        """Advise about an optimizer that updates in dynamic mode, where nothing averages its gradients."""
        if self._has_updated or not paddle.in_dynamic_mode():
            return
        self._has_updated = True
        if self._has_reduced or any(isinstance(each, paddle.DataParallel) for each in gc.get_objects()):
            return
        ranks = self.job.world_size
        self.advise(
            ConversionError(
                f"an optimizer updates in dynamic mode, on each rank alone, so {ranks} ranks train {ranks} models: "
                "call paddle.enable_static() at the top of the script, before the network is built, and train with "
                "fleet.distributed_optimizer(optimizer).minimize(loss); or stay dynamic with "
                "paddle.DataParallel(network)"
            )
        )

    def on_reduction(self) -> None:
        self._has_reduced = True

    def on_feed(self, program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        """Look at what the next run is fed, and keep it: an error about its gradients says whether that is finite."""
        self._feed = feed
        running = paddle.static.default_main_program() if program is None else program
        numbers = exchanges_in(running)
        self.job.trains = bool(numbers) or not isinstance(running, paddle.static.Program)
        exchange = next((each for _, each in reversed(self.exchanges) if each.number in numbers), None)
        if exchange is not None:
            self._running = exchange.step + 1, script_line()
            exchange.barrier.samples.fed(feed)
        return feed, fetch_list

    def describe_steps(self) -> str:
        """``18 steps, the last one in train.py, line 14``, of those begun; empty if there were none."""
        return "{} steps, the last one in {}".format(*self._running) if self._running is not None else ""

    def why_failed(self, error: Exception) -> FleetTrainError | None:
        """The error for a run with NaN, or in dynamic mode."""
        if isinstance(self.job.failure, NotFinite) and not isinstance(error, NotFinite):
            self.job.failure = NotFinite(f"{self.job.failure}{of_feeds(self._feed)}")
            return self.job.failure
        if paddle.in_dynamic_mode() and isinstance(error, AttributeError):
            return ConversionError(
                "Executor.run was called in dynamic mode, and it runs static programs: call paddle.enable_static() at "
                "the top of the script, before the network is built"
            )
        return None

    def feed_through_pinned_memory(self, program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        """A hook before each run on a device: the executor itself would copy arrays with Python's lock, after all that
        is enqueued, and no watchdog could run meanwhile."""
        del program
        if isinstance(feed, Mapping):
            with ensured_dynamic_mode():
                feed = {name: self._on_device(value) for name, value in feed.items()}
        return feed, fetch_list

    def _on_device(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype == np.object_:
            return value
        eager, fed = self.job.engine.device.to_device(value), paddle.base.core.DenseTensor()
        fed._share_data_with(eager.get_tensor())  # which itself is a reference that does not keep the values
        return fed

    def _what_drifts(self, program: Any) -> str:
        """What of a program's values is this rank's own now, in words; empty if all ranks hold the same."""
        found = [each for each in exchanges_of(program) if each.exchange.equal_after != each.exchange.step]
        if any(each.exchange.averager is not None for each in found):
            return "LocalSGD's ranks differ between averagings"
        held = set(held_names(program))
        if any(held.intersection(statistics_of(each.main)) for each in found):
            return "each rank's batch norms keep the running statistics of its own batches"
        return ""


prescribed_profile: Profile | None = None
"""The profile of a trial, whatever the script or the launcher names; None: theirs."""
offered_profile: Profile | None = None
"""The profile of spawned ranks whose script names none."""
_session: Session | None = None
_has_left_a_job = False
imagined_job: Callable[[], Job] | None = None
"""What makes the job that ``init`` joins where only plans are made; None elsewhere."""


def begin(role: Any, strategy: Any) -> Session:
    """Join the job; see ``fleet.init``."""
    global _session
    if _session is not None:
        raise ConversionError("fleet.init was called twice; one call joins the job for the whole process")
    if _has_left_a_job:
        raise ConversionError("this process has left its job (fleet.shutdown); a process can join only one job")
    strict = is_strict(os.environ)
    job = imagined_job() if imagined_job else join(cluster_of(role), join_timeout_seconds(os.environ))
    _session = Session(job, strategy, strict)
    process.watch(job)
    job.advise, job.settle = _session.advise, settle
    job.describe_steps = _session.describe_steps
    if not imagined_job:
        note_training(process.on_each_run, _is_trained)
        process.before_each_run(refuse_foreign_fetches, is_last=True)
        if checks := asked_checks(os.environ):
            verify.begin(job, checks)
    if job.world_size > 1 and not imagined_job:
        before_first_runs(_session.on_first_run)
        process.before_each_run(_session.on_feed, is_last=True)
        replays = Replays(job, _session.exchanges)
        process.on_each_run(replays.note)
        process.explain_failed_runs(replays.why_failed)
        process.explain_failed_runs(_session.why_failed)
        _call_before(paddle.optimizer.Optimizer, "_apply_optimize", _session.on_dynamic_update)
        _call_before(paddle.distributed.communication.stream, "all_reduce", _session.on_reduction)
        if not job.engine.side_by_side:
            process.before_each_run(_session.feed_through_pinned_memory, is_last=True)
        process.before_each_run(replays.before_run, is_last=True)
    if not imagined_job and (steps := asked_trace(os.environ)) is not None:
        trace_steps(*steps)
    return _session


def _is_trained(program: Any) -> bool:
    return _session is not None and (program is _session.main_program or bool(exchanges_in(program)))


def _call_before(owner: Any, name: str, hook: Callable[[], None]) -> None:
    """Call ``hook`` before each call of a function of Paddle, from now on."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def hooked(*args: Any, **named: Any) -> Any:
        hook()
        return function(*args, **named)

    process.replace(owner, name, hooked)


def trace_steps(first: int, last: int, folder: Path | None = None) -> None:
    """Trace steps; see ``fleet.trace``."""
    job, folder = current().job, folder or log_folder(os.environ) or Path()
    if job.world_size == 1:
        log_once(["nothing is traced: a job of one process has no steps that communicate"], job.cluster.rank)
    else:
        trace.begin(Trace(first, last, folder, job.cluster.rank, lambda: clock_of(job.store)))


def is_open() -> bool:
    """Whether ``fleet.init`` was called, and ``fleet.shutdown`` was not."""
    return _session is not None


def current() -> Session:
    """The session; ConversionError before ``fleet.init``."""
    if _session is None:
        raise ConversionError("fleet.init(role) has not been called yet; call it before anything else of fleet")
    return _session


def current_shares() -> BatchShares:
    """The ranks' shares of the joint batch, by the profile of the optimizer that was wrapped last."""
    now = current()
    now.shares = now.shares or BatchShares(now.job, now.profile or Profile())
    return now.shares


def settle() -> None:
    """Make the update that is still to come (``overlap_next_step``), if there is one; see ``fleet.flush``."""
    if _session is not None and _session.next_step is not None:
        _session.next_step.flush()


def end() -> None:
    """Leave the job; see ``fleet.shutdown``."""
    global _session, _has_left_a_job
    if _session is not None:
        _has_left_a_job = _session.job.world_size > 1 and imagined_job is None
        process.leave(_session.job)
        _session = None


def program_or_last(main_program: Any) -> Any:
    """The program of a call: the one given, else the one converted last."""
    return main_program or current().main_program or paddle.static.default_main_program()


@dataclass(frozen=True)
class Converted:
    """A converted program and its communication, found by what it shares with another program."""

    main: Any
    exchange: GradientExchange
    is_own: bool
    """Whether the other program is this one, or a copy of it with its updates."""


def exchange_of(program: Any) -> GradientExchange | None:
    """The communication of a converted program or of a copy of it, the last one of several; None with one process."""
    return next((each.exchange for each in exchanges_of(program) if each.is_own), None)


def exchanges_of(program: Any = None) -> list[Converted]:
    """The converted programs that change a parameter or a statistic of ``program`` in Paddle's global scope, with what
    they remember of the training there; None: any.

    A copy, a program for evaluation and one that shares some parameters are known by their names. The program's own
    conversions come first; of others that change the same values, the latest one counts.
    """
    converted = current().exchanges
    if not converted:
        return []
    settle()
    programs = [main for main, _ in converted] if program is None else [program]
    own = frozenset[int]() if program is None else exchanges_in(program)
    left = {name for each in programs for name in held_names(each)}
    pairs = [Converted(main, each, main is program or each.number in own) for main, each in reversed(converted)]
    found = []
    for each in sorted(pairs, key=lambda pair: not pair.is_own):
        changes = {*each.exchange.trained, *statistics_of(each.main)}
        if each.is_own or (changes & left and not missing_in_scope(each.main)):
            each.exchange.enter(current().owner_of(paddle.static.global_scope(), each.exchange))
            found.append(each)
            left -= changes
    return found


def before_first_runs(first_run: Callable[[Any], None]) -> None:
    """Call ``first_run`` from now on with each program before it runs as it is now for the first time.

    A script that calls ``minimize`` before it wraps the optimizer, on the old variable, or on an optimizer that it
    never wraps, trains a separate model on each rank, and nothing fails. ``paddle.static.Executor.run`` runs every
    static program: `updates_alone` is asked at a program's first run, and again when it has got operators since.
    """
    look = once_until_grown(first_run)  # a program may be evaluated before ``minimize``

    def check(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        running = paddle.static.default_main_program() if program is None else program
        if isinstance(running, paddle.static.Program):
            look(running)
        return feed, fetch_list

    process.before_each_run(check)
