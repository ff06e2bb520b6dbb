"""The state between ``fleet.init`` and ``fleet.shutdown``, which the facade's modules share, and what it looks for in
each program that runs: updates without communication."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import paddle

import fleet_train
from fleet_train.cluster.environment import is_strict, join_timeout_seconds
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import is_link
from fleet_train.collectives.job import Job
from fleet_train.collectives.join import join
from fleet_train.convert import process
from fleet_train.convert.one_card import (
    leave_out_host_operators,
)
from fleet_train.convert.optimizer import DistributedOptimizer
from fleet_train.convert.passes.blocks import nested_operators
from fleet_train.convert.role_maker import cluster_of
from fleet_train.errors import ConversionError, FleetTrainError
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

    def on_converted(self, main: Any, startup: Any, plan: CommPlan | None, exchange: GradientExchange | None) -> None:
        self.main_program, self.startup_program = main, startup
        leave_out_host_operators(self._is_drifting)
        if plan is not None and exchange is not None:
            self.plans.append(plan)
            self.exchanges.append((main, exchange))

    def on_first_run(self, program: Any) -> None:
        """Advise about a program that trains on each rank alone."""
        ours = {gradient.name for plan in self.plans for bucket in plan.buckets for gradient in bucket.gradients}
        where = updates_alone(program, ours)
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

    def advise(self, error: FleetTrainError) -> None:
        """Say once, on rank 0, what is probably a mistake in the script; with ``--strict`` it is an error."""
        if self.is_strict:
            raise error
        log_once([str(error)], self.job.cluster.rank)

    def _is_drifting(self, program: Any) -> bool:
        return any(main is program and exchange.averager is not None for main, exchange in self.exchanges)


_session: Session | None = None
_has_left_a_job = False
_imagined_job: Callable[[], Job] | None = None
_prescribed: Profile | None = None
_offered: Profile | None = None


def begin(role: Any, strategy: Any) -> Session:
    """Join the job; see ``fleet.init``."""
    global _session
    if _session is not None:
        raise ConversionError("fleet.init was called twice; one call joins the job for the whole process")
    if _has_left_a_job:
        raise ConversionError("this process has left its job (fleet.shutdown); a process can join only one job")
    strict = is_strict(os.environ)
    job = _imagined_job() if _imagined_job else join(cluster_of(role), join_timeout_seconds(os.environ))
    _session = Session(job, strategy, strict)
    process.watch(job)
    job.advise = _session.advise
    if job.world_size > 1 and not _imagined_job:
        watch(_session.on_first_run)
    return _session


def join_as(make_job: Callable[[], Job] | None) -> None:
    """For planning: from now on ``begin`` uses this job instead of joining one; None ends this."""
    global _imagined_job
    _imagined_job = make_job


def prescribe(profile: Profile | None) -> None:
    """For trials: from now on this profile is used, whatever the script or launcher names; None ends this."""
    global _prescribed
    _prescribed = profile


def prescribed() -> Profile | None:
    """The profile given to `prescribe`."""
    return _prescribed


def offer(profile: Profile) -> None:
    """For spawned ranks: the profile if a script names none, like the launcher's --strategy."""
    global _offered
    _offered = profile


def offered() -> Profile | None:
    """The profile given to `offer`."""
    return _offered


def is_open() -> bool:
    """Whether ``fleet.init`` was called, and ``fleet.shutdown`` was not."""
    return _session is not None


def current() -> Session:
    """The session; ConversionError before ``fleet.init``."""
    if _session is None:
        raise ConversionError("fleet.init(role) has not been called yet; call it before anything else of fleet")
    return _session


def end() -> None:
    """Leave the job; see ``fleet.shutdown``."""
    global _session, _has_left_a_job
    if _session is not None:
        _has_left_a_job = _session.job.world_size > 1 and _imagined_job is None
        process.leave(_session.job)
        _session = None


def program_or_last(main_program: Any) -> Any:
    """The program of a call: the one given, else the one converted last."""
    return main_program or current().main_program or paddle.static.default_main_program()


def exchange_of(program: Any) -> GradientExchange | None:
    """The communication of a converted program; None with one process."""
    found = [exchange for main, exchange in current().exchanges if main is program]
    return found[-1] if found else None


_FRAME = re.compile(r'File "(.+)", line (\d+)')
_LIBRARIES = (paddle.__file__, fleet_train.__file__, os.__file__)
_NOT_THE_SCRIPT = (*(os.path.dirname(str(file)) + os.sep for file in _LIBRARIES), "<frozen", "<decorator")


def watch(first_run: Callable[[Any], None]) -> None:
    """From now on ``first_run`` is called with each program before it runs as it is now for the first time.

    A script that calls ``minimize`` before it wraps the optimizer, on the old variable, or on an optimizer that it
    never wraps, trains a separate model on each rank, and nothing fails. ``paddle.static.Executor.run`` runs every
    static program: `updates_alone` is asked at a program's first run, and again when it has got operators since.
    """
    # Programs that have run, with their number of operators then: a program may be evaluated before ``minimize``.
    seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def look(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        about = paddle.static.default_main_program() if program is None else program
        if isinstance(about, paddle.static.Program) and seen.get(about) != about.num_ops():
            seen[about] = about.num_ops()
            first_run(about)
        return feed, fetch_list

    process.before_each_run(look)


def updates_alone(program: Any, converted: set[str]) -> str:
    """Where a program updates parameters without the other ranks, as words for a message; empty if nowhere.

    ``converted``: the parameters that this process's converted programs update.
    """
    block = program.global_block().ops
    together = {*converted, ""} if any(map(is_link, block)) else set()
    for operator in chain(block, *map(nested_operators, block)):
        if _updates(operator) and (name := _parameter(operator)) not in together:
            return _line_of(operator) or f"the program with parameter '{name}'"
    return ""


def _updates(operator: Any) -> bool:
    """Whether it changes a parameter in place by a gradient; only Paddle's own operators can name their operands."""
    name = operator.name()
    return name.startswith("pd_op.") and name.endswith("_") and set(operator.get_input_names()) >= {"param", "grad"}


def _parameter(update: Any) -> str:
    value = update.operand_source(update.get_input_names().index("param"))
    return str(value.get_defining_op().attrs().get("parameter_name", ""))


def _line_of(operator: Any) -> str:
    """The script's line that made an operator, such as ``train.py, line 12 (optimizer.minimize(loss))``."""
    stack = [str(line).strip() for line in operator.attrs().get("op_callstack") or ()]
    place = ""
    for index, line in enumerate(stack):
        frame = _FRAME.match(line)
        if frame is not None and not frame[1].startswith(_NOT_THE_SCRIPT):
            code = "".join(f" ({text[:80]})" for text in stack[index + 1 : index + 2] if not _FRAME.match(text))
            place = f"{os.path.basename(frame[1])}, line {frame[2]}{code}"
    return place
