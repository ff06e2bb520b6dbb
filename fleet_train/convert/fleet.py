"""The facade: what a training script sees as ``fleet``. Fleet's names, one job per process.

``init`` joins the cluster, ``distributed_optimizer`` wraps an optimizer, ``main_program`` is what to train,
``save_persistables`` saves. With one process nothing is sent, and only what the profile's passes ask for is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet_train.cluster.environment import asked_strategy, join_timeout_seconds
from fleet_train.collectives.paddle_check import require_paddle
from fleet_train.convert import exits
from fleet_train.errors import ConversionError

exits.install()
require_paddle()

import paddle  # noqa: E402

from fleet_train.collectives.exchange import GradientExchange  # noqa: E402
from fleet_train.collectives.gate_notes import Communication  # noqa: E402
from fleet_train.collectives.job import Job  # noqa: E402
from fleet_train.collectives.join import join  # noqa: E402
from fleet_train.convert import agreement, saving  # noqa: E402
from fleet_train.convert.apply_profile import apply_environment, say  # noqa: E402
from fleet_train.convert.exporting import export_inference_model  # noqa: E402
from fleet_train.convert.local_state import make_equal  # noqa: E402
from fleet_train.convert.optimizer import DistributedOptimizer  # noqa: E402
from fleet_train.convert.program_state import ProgramState  # noqa: E402
from fleet_train.convert.role_maker import cluster_of  # noqa: E402
from fleet_train.convert.saving import Captured  # noqa: E402
from fleet_train.convert.strategy import DistributedStrategy  # noqa: E402
from fleet_train.plan import CommPlan  # noqa: E402
from fleet_train.profile import Profile, applied_mappings, load_profile  # noqa: E402

if TYPE_CHECKING:
    main_program: Any
    startup_program: Any

__all__ = [
    "agree",
    "all_reduce",
    "barrier_worker",
    "capture_persistables",
    "communication",
    "distributed_optimizer",
    "first_not_finite",
    "gather",
    "init",
    "is_first_worker",
    "load_persistables",
    "local_rank",
    "loss_scale",
    "main_program",
    "node_num",
    "place",
    "plan",
    "profile",
    "request_stop",
    "save_inference_model",
    "save_persistables",
    "should_fetch",
    "shutdown",
    "startup_program",
    "stop_requested",
    "synchronize_parameters",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]


@dataclass
class _Session:
    """One ``init`` .. ``shutdown``."""

    job: Job
    profile: Profile | None = None
    main_program: Any = None
    startup_program: Any = None
    plans: list[CommPlan] = field(default_factory=list)
    optimizers: list[DistributedOptimizer] = field(default_factory=list)
    exchanges: list[tuple[Any, GradientExchange]] = field(default_factory=list)
    """Converted programs with their communication."""


_session: _Session | None = None
_has_left_a_job = False
_imagined_job: Callable[[], Job] | None = None


def init(role: Any = None) -> None:
    """Join the cluster that the launcher describes; with no launcher, become a job of one process.

    ``role``: ``role_maker.PaddleCloudRoleMaker(is_collective=True)``, Paddle's role maker of that name, or None.
    Bounded by the launcher's ``--join_timeout`` (300 s). Raises ClusterError when the environment describes no usable
    cluster, JoinTimeout naming the ranks that did not come, ScheduleMismatch when ranks disagree on versions.
    """
    global _session
    if _session is not None:
        raise ConversionError("fleet.init was called twice; one call joins the job for the whole process")
    if _has_left_a_job:
        raise ConversionError("this process has left its job (fleet.shutdown); a process joins one job in its life")
    job = _imagined_job() if _imagined_job else join(cluster_of(role), join_timeout_seconds(os.environ))
    _session = _Session(job)
    exits.watch(job)


def join_as(make_job: Callable[[], Job] | None) -> None:
    """For planning: from now on ``init`` takes this job instead of joining one; None ends that."""
    global _imagined_job
    _imagined_job = make_job


def _current() -> _Session:
    if _session is None:
        raise ConversionError("fleet.init(role) has not been called yet; it is the first of the four lines")
    return _session


def distributed_optimizer(optimizer: Any, strategy: Any = None) -> DistributedOptimizer:
    """Wrap any Paddle optimizer.

    ``strategy``: our ``DistributedStrategy``, a stock ``paddle.distributed.fleet.DistributedStrategy``, a profile's
    name or path, or None: then the launcher's ``--strategy``, else ``multi_node`` on several nodes and
    ``single_node`` on one. Raises ProfileError for settings that cannot be carried out.
    """
    session = _current()
    rank, node_num = session.job.cluster.rank, session.job.cluster.node_num
    session.profile, notices = _resolve(strategy, session.job).overridden_by(os.environ)
    if strategy is not None and asked_strategy(os.environ):
        notices.append(
            f"the script names its own strategy; the launcher's --strategy is not used ({asked_strategy(os.environ)})"
        )
    notices += apply_environment(session.profile)
    say([*notices, *applied_mappings(session.profile, node_num)], rank)
    session.optimizers.append(DistributedOptimizer(optimizer, session.profile, session.job, _on_converted))
    return session.optimizers[-1]


def _resolve(strategy: Any, job: Job) -> Profile:
    if strategy is None:
        strategy = asked_strategy(os.environ) or ("multi_node" if job.cluster.node_num > 1 else "single_node")
    if isinstance(strategy, (str, Path)):
        return load_profile(str(strategy))
    if isinstance(strategy, Profile):
        return strategy
    if isinstance(strategy, DistributedStrategy):
        return strategy.to_profile()
    return DistributedStrategy.from_stock(strategy).to_profile()


def _on_converted(main: Any, startup: Any, plan: CommPlan | None, exchange: GradientExchange | None) -> None:
    session = _current()
    session.main_program, session.startup_program = main, startup
    if plan is not None and exchange is not None:
        session.plans.append(plan)
        session.exchanges.append((main, exchange))


def _exchange_of(program: Any) -> GradientExchange | None:
    found = [exchange for main, exchange in _current().exchanges if main is program]
    return found[-1] if found else None


def __getattr__(name: str) -> Any:
    if name == "main_program":
        return _current().main_program or paddle.static.default_main_program()
    if name == "startup_program":
        return _current().startup_program or paddle.static.default_startup_program()
    raise AttributeError(f"module 'fleet_train.fleet' has no attribute {name!r}")


def place() -> Any:
    """The device of this rank: ``CUDAPlace`` of its GPU on a GPU build, else ``CPUPlace``."""
    return _current().job.place


def worker_index() -> int:
    """This process's rank, 0 .. worker_num() - 1."""
    return _current().job.cluster.rank


def worker_num() -> int:
    """The number of processes of the job (world size)."""
    return _current().job.world_size


def local_rank() -> int:
    """This process's index on its node."""
    return _current().job.cluster.local_rank


def node_num() -> int:
    """The number of nodes of the job."""
    return _current().job.cluster.node_num


def is_first_worker() -> bool:
    """Whether this is rank 0, the one that reports and saves."""
    return worker_index() == 0


def worker_endpoints() -> list[str]:
    """``host:port`` of every rank, by rank."""
    return _current().job.cluster.endpoints


def profile() -> Profile:
    """The profile that ``distributed_optimizer`` has resolved; before that call, the default one."""
    return _current().profile or Profile()


def plan() -> CommPlan | None:
    """The communication plan of the program converted last; None with one process."""
    plans = _current().plans
    return plans[-1] if plans else None


def should_fetch(step: int) -> bool:
    """Whether an own loop should fetch the loss at this step (0, 1, ...): every ``fetch_frequency`` steps.

    Nothing stops a loop that does not ask: what is in ``fetch_list`` is fetched.
    """
    return step % profile().fetch_frequency == 0


def barrier_worker(timeout_seconds: float | None = None) -> None:
    """Wait for all ranks, at most ``timeout_seconds`` (default: the join timeout).

    Raises WorkerFailed naming the ranks that did not come, died or left.
    """
    job = _current().job
    job.gather(f"barrier {job.count('barrier')}", timeout_seconds=timeout_seconds)


def all_reduce(array: Any, op: str = "sum") -> np.ndarray[Any, Any]:
    """Reduce a numpy array over all ranks; every rank gets the result, same shape and dtype.

    ``op``: ``sum``, ``max`` or ``min``. dtypes: float32, float64, int32, int64. All ranks call it in the same order.
    Raises ConversionError when the ranks bring different shapes, dtypes or operations.
    """
    return _current().job.reduce(np.asarray(array), op)


def agree(name: str, value: Any) -> None:
    """Stop every rank with ScheduleMismatch unless all bring the same JSON value: ``agree("steps", len(loader))``.

    For what a job must have in common and fleet_train cannot see. All ranks call it in the same order.
    """
    agreement.agree(_current().job, name, value)


def gather(value: Any) -> list[Any]:
    """The JSON value of every rank, by rank, on every rank. For facts, not for tensors: it goes through the store.

    All ranks call it in the same order. Raises WorkerFailed naming the ranks that did not come, died or left.
    """
    job = _current().job
    values = job.gather(f"gather {job.count('gather')}", value)
    return [values[rank] for rank in range(job.world_size)]


def request_stop(reason: str) -> None:
    """Ask all ranks to stop in good order; safe in a signal handler. Any rank may ask; nothing is sent at once."""
    _current().job.notes.request_stop(reason)


def stop_requested() -> str | None:
    """Who asked for a stop and why, such as ``rank 1 (10.0.0.2:6171): SIGTERM``; None while nobody has.

    The same on every rank after the same step: the request travels with the next step that communicates (LocalSGD: the
    next averaging or synchronous step; gradient merge: the next update). One process knows at once.
    """
    return _current().job.notes.stop


def communication() -> Communication:
    """What communication has cost since the last call: see ``Communication``. One process: zeros and one entry."""
    session = _current()
    if not session.exchanges:
        return session.job.notes.read(local_sgd_period=0)
    return session.exchanges[-1][1].communication()


def loss_scale() -> float | None:
    """What the loss of the optimizer made last is multiplied by now (float16 mixed precision); None without a scale."""
    optimizers = _current().optimizers
    name = optimizers[-1].loss_scale_name if optimizers else None
    variable = None if name is None else paddle.static.global_scope().find_var(name)
    return None if variable is None else float(np.asarray(variable.get_tensor()).item())


def synchronize_parameters(main_program: Any = None) -> None:
    """Make parameters and batch-norm statistics equal on all ranks now, as means over the ranks.

    LocalSGD lets parameters drift between averagings; a batch norm that is not synchronised takes its statistics from
    each rank's own batches. Call it on all ranks before an evaluation. It is done by itself before every save.
    """
    program = main_program or __getattr__("main_program")
    exchange = _exchange_of(program)
    if exchange is not None:
        state = ProgramState(program, paddle.static.global_scope())
        make_equal(_current().job, state, exchange, with_optimizer=False)


def first_not_finite(main_program: Any = None) -> str | None:
    """The name of the first parameter or batch-norm statistic of this rank that holds NaN or infinity."""
    program = main_program or __getattr__("main_program")
    return ProgramState(program, paddle.static.global_scope()).first_not_finite()


def capture_persistables(main_program: Any = None, memory: Captured | None = None) -> Captured:
    """What ``save_persistables`` would save, copied into rank 0's memory; its ``write(folder)`` may run on a thread.

    All ranks call it after the same step. ``memory``: an earlier capture that is written; its memory is used again.
    """
    program, scope = main_program or __getattr__("main_program"), paddle.static.global_scope()
    return saving.capture(_current().job, program, scope, _exchange_of(program), memory)


def save_persistables(exe: Any, dirname: str | os.PathLike[str], main_program: Any = None) -> None:
    """Save all that a resumed run needs of the program: rank 0 writes, all return when it is done.

    Parameters, statistics, optimizer state, what the profile's passes, LocalSGD and compression keep, also where each
    rank has its own. With LocalSGD, parameters and optimizer state are averaged first. Writes
    ``persistables.safetensors``, ``persistables.json`` and, for what differs between ranks, ``ranks.safetensors`` into
    ``dirname``. Raises CheckpointError on every rank when rank 0 could not write.
    """
    del exe  # Fleet's signature; the state is read from the scope
    program, scope = main_program or __getattr__("main_program"), paddle.static.global_scope()
    saving.save(_current().job, program, scope, _exchange_of(program), Path(dirname))


def load_persistables(exe: Any, dirname: str | os.PathLike[str], main_program: Any = None) -> None:
    """Load what ``save_persistables`` wrote. Rank 0 reads, the others get its values over the network.

    The startup program must have run. Raises CheckpointError on every rank, naming the first offending tensor, for
    state that is missing, cut off, altered, or of another model. The number of ranks may be another one.
    """
    del exe
    program, scope = main_program or __getattr__("main_program"), paddle.static.global_scope()
    saving.load(_current().job, program, scope, _exchange_of(program), Path(dirname))


def save_inference_model(exe: Any, dirname: str | os.PathLike[str], feeds: list[Any], targets: list[Any]) -> None:
    """Export the forward program, pruned to ``feeds`` -> ``targets``, with its parameters, for Paddle's inference.

    ``targets``: values of the training program or, better, of one built with ``layer.eval()`` that has the same
    parameters. ``feeds``: values or names of its inputs. LocalSGD's parameters are averaged first. Rank 0 writes
    ``model.json`` and ``model.pdiparams`` into ``dirname``; all ranks return once they are on disk.
    """
    synchronize_parameters()
    scope = paddle.static.global_scope()
    saving.on_first_worker(
        _current().job,
        f"export to {dirname}",
        lambda: export_inference_model(exe, Path(dirname), feeds, targets, scope),
    )


def shutdown() -> None:
    """Leave the job in good order; called at exit by itself. A process of several cannot join again after it."""
    global _session, _has_left_a_job
    if _session is not None:
        _has_left_a_job = _session.job.world_size > 1 and _imagined_job is None
        exits.watch(None)
        _session.job.leave()
        _session = None
