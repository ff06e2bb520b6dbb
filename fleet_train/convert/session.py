"""The state between ``fleet.init`` and ``fleet.shutdown``; the facade's modules share it."""

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
from fleet_train.convert import exits, replaced
from fleet_train.convert.optimizer import DistributedOptimizer
from fleet_train.convert.passes.blocks import nested_operators
from fleet_train.convert.passes.norm_arithmetic import make_norms_plain, makers_of, remove_unused
from fleet_train.convert.profile_settings import say
from fleet_train.convert.role_maker import cluster_of
from fleet_train.errors import ConversionError, FleetTrainError
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
        say([str(error)], self.job.cluster.rank)

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
    exits.watch(job)
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
        exits.leave(_session.job)
        _session = None


def program_or_last(main_program: Any) -> Any:
    """The program of a call: the one given, else the one converted last."""
    return main_program or current().main_program or paddle.static.default_main_program()


def exchange_of(program: Any) -> GradientExchange | None:
    """The communication of a converted program; None with one process."""
    found = [exchange for main, exchange in current().exchanges if main is program]
    return found[-1] if found else None


# Programs that train on each rank alone: an update without communication is found when its program first runs.
#
# A script that calls ``minimize`` before it wraps the optimizer, on the old variable, or on an optimizer that it
# never wraps, trains a separate model on each rank, and nothing fails. ``paddle.static.Executor.run`` runs every
# static program; while this process is in a job of several ranks, it is replaced by a function that looks at each
# program at its first run, and again when it has got operators since.


_FRAME = re.compile(r'File "(.+)", line (\d+)')
_LIBRARIES = (paddle.__file__, fleet_train.__file__, os.__file__)
_NOT_THE_SCRIPT = (*(os.path.dirname(str(file)) + os.sep for file in _LIBRARIES), "<frozen", "<decorator")


def watch(first_run: Callable[[Any], None]) -> None:
    """From now on ``first_run`` is called with each program before it runs as it is now for the first time."""
    # Programs that have run, with their number of operators then: a program may be evaluated before ``minimize``.
    seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def look(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        about = paddle.static.default_main_program() if program is None else program
        if isinstance(about, paddle.static.Program) and seen.get(about) != about.num_ops():
            seen[about] = about.num_ops()
            first_run(about)
        return feed, fetch_list

    replaced.before_each_run(look)


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


# Makes Paddle save a converted program as the program of one card, without our operators.
#
# A host operator holds a pointer to its function, which Paddle cannot write (``Unknown Attr``), so
# ``paddle.static.save`` would fail after the training. Scripts call Paddle directly, and all of Paddle's functions
# that write a program end in one function of its core; that one is replaced, and it changes only programs that could
# not be written before.


_OURS = "fleet_train_"
_NAME = re.compile(r"fleet_train_([a-z]+)_(?:(\d+_\d+)_)?\d+_-?\d+$")

_original: Callable[..., Any] = paddle.base.core.serialize_pir_program
_is_drifting: Callable[[Any], bool] = bool


def leave_out_host_operators(is_drifting: Callable[[Any], bool]) -> None:
    """From now on Paddle writes converted programs as programs of one card. ``is_drifting``: does it use LocalSGD?"""
    global _original, _is_drifting
    _is_drifting = is_drifting
    _original = replaced.replace(paddle.base.core, "serialize_pir_program", _serialize)


def _serialize(program: Any, *arguments: Any, **options: Any) -> Any:
    if not any(_is_ours(operator) for operator in program.global_block().ops):
        return _original(program, *arguments, **options)
    if _is_drifting(program):
        notice = (
            "paddle.static.save writes this rank's own parameters, and LocalSGD's ranks differ between averagings: "
            "call fleet.synchronize_parameters() on all ranks before it, or use fleet.save_persistables"
        )
        say([notice], rank=0)
    return _original(for_one_card(program), *arguments, **options)


def for_one_card(program: Any) -> Any:
    """A copy of a converted program in which each gradient goes directly to its update, with plain batch norms."""
    reference = program.clone()
    ours = [operator for operator in reference.global_block().ops if _is_ours(operator)]
    local: dict[str, list[Any]] = {}
    for operator in ours:
        _bypass(operator, local)
    forward, backward = ([operator for operator in ours if _kind(operator)[0] == kind] for kind in ("gather", "total"))
    if forward:
        make_norms_plain(reference, forward, backward)
    for operator in reversed(ours):
        behind = makers_of(operator) if _kind(operator)[0] in ("gather", "total") else []
        reference.global_block().remove_op(operator)
        remove_unused(reference, behind)
    constants = [operator for operator in reference.global_block().ops if operator.name() == "pd_op.full"]
    remove_unused(reference, constants)  # among them are the first tokens of our chains
    return reference


def _bypass(operator: Any, local: dict[str, list[Any]]) -> None:
    """Replace a host operator's results by its inputs. ``local``: gradients of launched buckets."""
    kind, bucket = _kind(operator)
    given, gives = operator.operands_source(), operator.results()
    pairs: list[tuple[Any, Any]] = []
    match kind:
        case "launch":
            local[bucket] = given[1:]
        case "wait":
            pairs = list(zip(gives[1:], local[bucket], strict=False))
        case "broadcast":
            pairs = [(gives[1], given[1])]
        case "hold":
            pairs = list(zip(gives, given[:-1], strict=True))
    for old, new in pairs:
        old.replace_all_uses_with(new)


def _kind(operator: Any) -> tuple[str, str]:
    """``wait`` and ``1_0``, bucket 0 of conversion 1, for ``py_op.fleet_train_wait_1_0_12_-664...``."""
    match = _NAME.search(operator.name())
    return (match[1], match[2] or "") if match else ("", "")


def _is_ours(operator: Any) -> bool:
    return _OURS in operator.name()
