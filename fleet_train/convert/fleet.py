"""The facade: what a training script sees as ``fleet``. Fleet's names, one job per process.

``init`` joins the cluster, ``distributed_optimizer`` wraps an optimizer, ``main_program`` is the program to train,
``save_persistables`` saves. With one process nothing is sent, and only the profile's passes change the program.
"""

# ruff: noqa: E402 (the installed Paddle is checked before anything imports it)
from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet_train.cluster.at_import import main_script, warning_of
from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.engines import alone_despite, detect
from fleet_train.cluster.flight.trace import read_steps
from fleet_train.collectives.paddle_compat import require_paddle
from fleet_train.convert import process
from fleet_train.errors import ClusterError, ConversionError

process.install()
require_paddle()

import paddle

from fleet_train.collectives.step_notes import Communication as Communication
from fleet_train.convert import calls, metrics, planning, session, trainings
from fleet_train.convert.calls import UtilBase, meet, unknown, values_of_all
from fleet_train.convert.moving_average import replace_paddles
from fleet_train.convert.optimizer import DistributedOptimizer as _DistributedOptimizer
from fleet_train.convert.paddle_optimizers import refuse_wrapping_ours, unwrap
from fleet_train.convert.passes.exchanged import all_samples, first_sample, refuse_no_samples
from fleet_train.convert.planning import apply_environment, resolve
from fleet_train.convert.role_maker import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
from fleet_train.convert.saving import (
    capture_persistables,
    first_not_finite,
    load_persistables,
    save_inference_model,
    save_persistables,
    synchronize_parameters,
)
from fleet_train.convert.session import current as _current
from fleet_train.convert.shares import BatchShares
from fleet_train.convert.strategy import DistributedStrategy, needed, one_of
from fleet_train.lazy import part_if_there
from fleet_train.log import log_once
from fleet_train.plan import CommPlan
from fleet_train.profile import Profile, applied_mappings

if TYPE_CHECKING:
    even_batches: Any
    main_program: Any
    resumable: Any
    startup_program: Any

# Without any and all: ``from fleet_train.fleet import *`` must not replace Python's own.
__all__ = [
    "CollectiveOptimizer",
    "DistributedStrategy",
    "PaddleCloudRoleMaker",
    "Role",
    "UserDefinedRoleMaker",
    "UtilBase",
    "agree",
    "all_gather",
    "all_gather_samples",
    "all_reduce",
    "all_reduce_worker",
    "barrier_worker",
    "batch_shares",
    "batch_size",
    "batch_slice",
    "broadcast",
    "capture_persistables",
    "communication",
    "distributed_optimizer",
    "even_batches",
    "first_not_finite",
    "flush",
    "gather",
    "gone_workers",
    "init",
    "init_worker",
    "is_coordinator",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_persistables",
    "local_rank",
    "loss_scale",
    "main_program",
    "metrics",
    "minimize",
    "node_num",
    "nranks",
    "place",
    "plan",
    "profile",
    "rank",
    "rank_in_node",
    "request_stop",
    "resumable",
    "sample_offset",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_num",
    "should_fetch",
    "shutdown",
    "split_files",
    "startup_program",
    "stop_requested",
    "stop_worker",
    "synchronize_parameters",
    "trace",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]

util = UtilBase()
split_files = util.get_file_shard
batch_shares, batch_size, batch_slice = calls.batch_shares, calls.batch_size, calls.batch_slice
broadcast, all_gather = calls.broadcast, calls.all_gather


def init(
    role_maker: Any = None,
    is_collective: bool | None = None,
    strategy: Any = None,
    log_level: int | str = "INFO",
    *,
    role: Any = None,
) -> Any:
    """Join the cluster that the launcher describes; with no launcher, become a job of one process. Returns ``fleet``.

    ``role_maker``: ``PaddleCloudRoleMaker(is_collective=True)``, ``UserDefinedRoleMaker(is_collective=True, ...)``,
    Paddle's role makers of these names, or None. ``strategy`` is the default of ``distributed_optimizer``. Bounded by
    the launcher's ``--join_timeout`` (300 s). Raises ClusterError when the environment describes no usable cluster,
    JoinTimeout naming the ranks that did not connect, ScheduleMismatch when ranks disagree on versions.
    """
    given = one_of("init", role=role, role_maker=role_maker)
    if isinstance(given, (bool, str, DistributedStrategy)):
        raise ClusterError(
            f"fleet.init was given {given!r} as its role maker; its order is init(role_maker, is_collective, strategy)"
        )
    if given is None and is_collective is False:
        raise ClusterError(
            "fleet.init(is_collective=False) asks for parameter servers; fleet_train is for collective training: write "
            "fleet.init(is_collective=True)"
        )
    job = session.begin(given, strategy).job
    replace_paddles()
    refuse_wrapping_ours()
    if job.world_size > 1:
        process.on_each_run(trainings.choose)
    log_once(filter(None, [warning_of(main_script()), _who_started(job.cluster)]), job.cluster.rank)
    if log_level not in ("INFO", 20):
        log_once(
            [f"log_level: {log_level!r} is mapped: fleet_train prints each message once, on rank 0"], job.cluster.rank
        )
    return sys.modules[__name__]


def _who_started(cluster: Cluster) -> str:
    """One line about an engine that has started the ranks, or should have."""
    if cluster.world_size == 1:
        if alone := alone_despite(os.environ):
            session.current().advise(ClusterError(alone))
        return ""
    started = None
    with contextlib.suppress(ClusterError):  # joining has removed torchrun's MASTER_ADDR, which Paddle would take
        started = detect(os.environ)
    if started is None or cluster.formed_by != started.engine:  # an inner launcher has started the ranks
        return ""
    return f"started by {started.engine}: {cluster.world_size} ranks on {cluster.node_num} nodes"


def distributed_optimizer(optimizer: Any, strategy: Any = None) -> _DistributedOptimizer:
    """Wrap any Paddle optimizer.

    ``strategy``: our ``DistributedStrategy``, a stock ``paddle.distributed.fleet.DistributedStrategy``, a profile's
    name or path, or None: then that of ``init``, else ``spawn``'s, else ``multi_node`` on several nodes and
    ``single_node`` on one. The launcher's ``--strategy`` and ``--set`` win over all of these; rank 0 says what they
    overrule. A strategy object in which nothing was set is as None. Optimizers that
    Paddle wraps around others (``paddle.static.amp.decorate``, ``GradientMergeOptimizer``, ...) are unwrapped, and what
    they ask for becomes settings of the profile.

    Raises ProfileError for settings that cannot be carried out, ConversionError for optimizers that cannot.
    """
    now = _current()
    rank, node_num = now.job.cluster.rank, now.job.cluster.node_num
    unwrapped = unwrap(optimizer)
    if session.prescribed_profile is not None:
        asked, notices = unwrapped.added_to(session.prescribed_profile), list[str]()
    else:
        asked, notices = resolve(strategy, now.strategy, session.offered_profile, unwrapped, node_num)
    now.profile, more = asked.overridden_by(os.environ)
    now.shares = BatchShares(now.job, now.profile)
    notices += [*more, *apply_environment(now.profile)]
    log_once([*notices, *applied_mappings(now.profile, node_num)], rank)
    made = _DistributedOptimizer(unwrapped.optimizer, now.profile, now.job, now.on_converted)
    if unwrapped.around is not None:
        made.around_update(unwrapped.around)
    now.optimizers.append(made)
    return made


CollectiveOptimizer = distributed_optimizer


def minimize(
    loss: Any, startup_program: Any = None, parameter_list: Any = None, no_grad_set: Any = None
) -> tuple[Any, list[tuple[Any, Any]]]:
    """``minimize`` of the optimizer that ``distributed_optimizer`` returned last."""
    if not _current().optimizers:
        raise ConversionError(
            "fleet.minimize needs an optimizer: call fleet.distributed_optimizer(optimizer) before it"
        )
    return _current().optimizers[-1].minimize(loss, startup_program, parameter_list, no_grad_set)


def __getattr__(name: str) -> Any:
    if name == "main_program":
        return session.program_or_last(None)
    if name == "startup_program":
        return _current().startup_program or paddle.static.default_startup_program()
    if name in ("_origin_program", "_transpiled_program"):
        log_once(
            [f"fleet.{name} is fleet.main_program: minimize converts the program in place and makes no other one"],
            _current().job.cluster.rank,
        )
        return session.program_or_last(None)
    if name == "fleet":
        return sys.modules[__name__]
    if name in ("even_batches", "resumable") and (loop := part_if_there("fleet_train.train.loop")) is not None:
        return getattr(loop, name)
    raise unknown(name, __all__)


def profile() -> Profile:
    """The profile that ``distributed_optimizer`` has resolved; before that call, the default one."""
    return _current().profile or Profile()


def plan() -> CommPlan | None:
    """The communication plan of the program converted last; None with one process."""
    plans = _current().plans
    return plans[-1] if plans else None


def should_fetch(step: int) -> bool:
    """Whether a custom loop should fetch the loss at this step (0, 1, ...): every ``fetch_frequency`` steps.

    A step is an update: with gradient merge ``step`` is the same for all its micro-batches.

    It does not change the executor: everything in ``fetch_list`` is fetched.
    """
    return step % profile().fetch_frequency == 0


def flush() -> None:
    """With ``overlap_next_step``: make the update that is still to come, so that all variables of the scope have their
    values after the last step. All ranks call it. Done by itself wherever a script reads variables through Paddle or
    this package, and at the end."""
    session.settle()


def request_stop(reason: str) -> None:
    """Ask all ranks to stop gracefully; safe in a signal handler. Any rank may ask; nothing is sent at once."""
    _current().job.notes.request_stop(reason)


def stop_requested() -> str | None:
    """The rank that asked for a stop and why, such as ``rank 1 (10.0.0.2:6171): SIGTERM``; None if none has.

    The same on every rank after the same step: the request is sent with the next step that communicates (LocalSGD: the
    next averaging or synchronous step; gradient merge: the next update) and has a barrier (`barrier_every_steps`). One
    process knows at once.
    """
    return _current().job.notes.stop


def communication() -> Communication:
    """The cost of communication since the last call: see ``Communication``. One process: zeros and one entry."""
    now = _current()
    if not now.exchanges:
        return now.job.notes.read(local_sgd_period=0)
    return now.exchanges[-1][1].communication()


def loss_scale() -> float | None:
    """The current loss scale of the last optimizer (float16 mixed precision); None without one."""
    optimizers = _current().optimizers
    name = optimizers[-1].loss_scale_name if optimizers else None
    variable = None if name is None else paddle.static.global_scope().find_var(name)
    return None if variable is None else float(np.asarray(variable.get_tensor()).item())


def shutdown() -> None:
    """Leave the job gracefully; called automatically at exit. A process of a multi-process job cannot join again.

    Everything that was replaced in this process (``convert/process.py``) is put back: save before it.
    """
    session.end()


def place() -> Any:
    """The device of this rank: ``CUDAPlace`` of its GPU on a GPU build, else ``CPUPlace``."""
    return _current().job.place


def worker_index() -> int:
    """This process's rank, 0 .. worker_num() - 1. Also ``rank``."""
    return _current().job.cluster.rank


def worker_num() -> int:
    """The number of processes of the job (world size). Also ``nranks``, ``world_size``."""
    return _current().job.world_size


def local_rank() -> int:
    """This process's index on its node. Also ``rank_in_node``."""
    return _current().job.cluster.local_rank


def node_num() -> int:
    """The number of nodes of the job."""
    return _current().job.cluster.node_num


def is_first_worker() -> bool:
    """Whether this is rank 0, the one that reports and saves."""
    return worker_index() == 0


def is_worker() -> bool:
    """True: every process trains, there are no parameter servers."""
    _current()
    return True


def is_server() -> bool:
    """False: there are no parameter servers."""
    _current()
    return False


def is_coordinator() -> bool:
    """False: there is no coordinator of federated learning."""
    _current()
    return False


def server_num() -> int:
    """0: there are no parameter servers."""
    _current()
    return 0


def server_endpoints(to_string: bool = False) -> list[str] | str:
    """Empty: there are no parameter servers."""
    _current()
    return "" if to_string else []


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """``host:port`` of every rank, by rank; with ``to_string`` joined by commas."""
    endpoints = _current().job.cluster.endpoints
    return ",".join(endpoints) if to_string else endpoints


def gone_workers() -> dict[int, str]:
    """Ranks that have left the job (``left``) or are lost, and how, as currently recorded in the job's store. From any
    thread.

    Raises WorkerFailed if the store does not answer. Empty in a job of one process.
    """
    return _current().job.gone()


def init_worker(scopes: Any = None) -> None:
    """Does nothing: a worker without parameter servers is ready after ``init``."""
    del scopes  # Fleet's signature
    _current()


def stop_worker() -> None:
    """Does nothing: there are no servers, and a rank leaves the job when its script ends (``shutdown``)."""
    _current()


def barrier_worker(timeout_seconds: float | None = None) -> None:
    """Wait for all ranks, at most ``timeout_seconds`` (default: the join timeout).

    Raises WorkerFailed naming the ranks that did not arrive, died or left.
    """
    meet("fleet.barrier_worker()", timeout_seconds)


def all_reduce(array: Any = None, op: str | None = None, *, input: Any = None, mode: str | None = None) -> Any:
    """Reduce a numpy array over all ranks; every rank gets the result, same shape and dtype.

    ``op`` (Fleet's ``mode``): ``sum`` (the default), ``max``, ``min`` or ``mean``. dtypes: float32, float64, int32,
    int64. All ranks call it in the same order. Raises ConversionError when the ranks pass different shapes, dtypes or
    operations.
    """
    values = np.asarray(needed("all_reduce", input=input, array=array))
    operation = one_of("all_reduce", mode=mode, op=op) or "sum"
    return calls.reduce("fleet.all_reduce()", values, operation)


def all_reduce_worker(input: Any, output: Any) -> None:
    """The sum of ``input`` over all ranks, written into ``output`` (Fleet 1.8)."""
    output[:] = calls.reduce("fleet.all_reduce_worker()", np.asarray(input), "sum")


def all_gather_samples(value: Any) -> Any:
    """The samples of all ranks, [their number, ...], in rank order: for losses in which samples meet, such as a softmax
    over the batch. Called while the network is built, before ``minimize``; ``value`` [n, ...], n unlike on ranks or 0.

    Its gradient is that of all ranks' losses. One process: ``value`` itself. A program that does not train (an
    evaluation) has the samples of its own rank. Raises ConversionError for anything but a value of a program's main
    block with a batch dimension.
    """
    refuse_no_samples("fleet.all_gather_samples", value)
    return value if worker_num() == 1 else all_samples(value)


def sample_offset(value: Any) -> Any:
    """The index of this rank's first sample in ``all_gather_samples(value)``: a value of the program, int64, shape [1].

    ``labels = fleet.sample_offset(keys) + paddle.arange(paddle.shape(keys)[0])``. One process: 0.
    """
    refuse_no_samples("fleet.sample_offset", value)
    return paddle.zeros([1], "int64") if worker_num() == 1 else first_sample(value)


def trace(first: int, last: int | None = None, path: str | Path | None = None) -> None:
    """Trace the steps (updates, counted from 1) ``first`` to ``last``: each rank writes its events to
    ``trace.<rank>.bin`` in the folder ``path`` (default: the launcher's log folder, else the current one) when the last
    of them has ended, and ``fleet_train timeline`` shows them.

    All ranks call it, with steps to come. Called before ``minimize`` it also shows where the backward pass begins.
    """
    last = first if last is None else last
    read_steps(f"{first}-{last}", "fleet.trace")
    agree("the steps of fleet.trace", [first, last])
    session.trace_steps(first, last, None if path is None else Path(path))


def agree(name: str, value: Any) -> None:
    """Stop every rank with ScheduleMismatch unless all pass the same JSON value: ``agree("steps", len(loader))``.

    For values that all ranks must share and fleet_train cannot see. All ranks call it in the same order.
    """
    with _current().job.inside(f"fleet.agree({name!r})"):
        planning.agree(_current().job, name, value)


def gather(value: Any) -> list[Any]:
    """The JSON value of every rank, by rank, on every rank. For small values, not for tensors: it goes through the
    store.

    All ranks call it in the same order. Raises WorkerFailed naming the ranks that did not arrive, died or left.
    """
    return values_of_all("fleet.gather()", value)


def any(flag: Any) -> bool:
    """Whether ``flag`` is true on at least one rank; the same on every rank, so that all decide alike:
    ``if fleet.any(batch_is_bad): continue``.

    All ranks call it, and wait for one another. The host needs the flag: on a GPU that of a value waits for the
    device."""
    return True in values_of_all("fleet.any()", bool(flag))


def all(flag: Any) -> bool:
    """Whether ``flag`` is true on every rank; the same on every rank, as ``fleet.any``."""
    return False not in values_of_all("fleet.all()", bool(flag))


rank = worker_index
nranks = world_size = worker_num
rank_in_node = local_rank
