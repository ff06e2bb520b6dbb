"""``fleet_train.spawn``: call a function in several ranks on this machine, and return their results."""

from __future__ import annotations

import inspect
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.cluster import DEFAULT_JOIN_TIMEOUT_SECONDS
from fleet_train.cluster.engines import detect
from fleet_train.cluster.flight.witness import write_if_possible
from fleet_train.cluster.store.access import JOB_ID, SECRET, SECRET_FILE, Access
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import ClusterError, WorkerFailed
from fleet_train.launch.logs import log_name
from fleet_train.launch.node import (
    LaunchEnvironment,
    Machine,
    Node,
    build_environment,
    look_around,
    variables_of_rank,
)
from fleet_train.launch.prepare import check_log_dir, check_paddle, import_path_for_ranks
from fleet_train.launch.processes import Stopping
from fleet_train.launch.rendezvous import Rendezvous
from fleet_train.launch.workers import Cause, GracefulStop, Monitor, Ranks, witness_of
from fleet_train.spawning import shipping
from fleet_train.spawning.ranks import Output, SpawnedRank, end, interrupts_held, results, show
from fleet_train.spawning.shipping import name_of, shown


def spawn(
    train: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 2,
    *,
    strategy: Any = None,
    log_dir: str | os.PathLike[str] | None = None,
    join_timeout_seconds: float = DEFAULT_JOIN_TIMEOUT_SECONDS,
) -> list[Any]:
    """Call ``train(*args)`` in ``nprocs`` ranks on this machine; returns their results, by rank.

    The ranks are new processes: ``train`` may be defined in a notebook or a script, and joins its job by
    ``fleet.init`` as under the launcher. This process does not join. The output of rank 0 is shown immediately.
    ``strategy``: a profile's name or path, a `DistributedStrategy` or a `Profile`: the default of the ranks' ``fleet``.
    ``log_dir``: a folder for ``workerlog.N``, the output of each rank. ``join_timeout_seconds`` bounds ``fleet.init``.

    Raises RankFailed with the rank that failed first and its traceback; LinkFailed if the ranks could not communicate
    and none is to blame; Preempted if the ranks have stopped gracefully because they were asked to; ClusterError and
    ProfileError for invalid calls. Ctrl-C stops all ranks.
    """
    refuse_within_a_rank(os.environ)
    arguments = check_call(train, args)
    machine = look_around(os.environ)
    devices = check_ranks(nprocs, machine)
    timeout_seconds = check_seconds("join_timeout_seconds", join_timeout_seconds)
    logs = _log_dir(log_dir)
    profile = profile_of(strategy)
    check_paddle(machine, profile)
    body = shipping.ship(train, arguments, profile)
    with ExitStack() as stack:
        node, access, rendezvous = stack.enter_context(rendezvous_of(nprocs, devices))
        base = build_environment(
            node,
            machine,
            os.environ,
            profile=profile.worker_environment() if profile else {},
            join_timeout_seconds=timeout_seconds,
            import_path=import_path_for_ranks(),
        )
        if base.kept:
            names = ", ".join(base.kept)
            show(f"fleet_train: {names}: the environment's value is used, not the profile's; unset it to use that\n")
        greeting = shipping.create()
        stack.callback(os.close, greeting)
        shipping.write(greeting, _greeting(train), body)
        every, output = environs(base, node, access, os.environ), Output(show)

        def start_rank(index: int) -> SpawnedRank:
            rank = SpawnedRank(index, every[index], greeting, None if logs is None else logs / log_name(index))
            output.add(rank)
            return rank

        ranks = Ranks(node, start_rank, owns_descendants=False)
        try:
            _start(ranks)
            stop = GracefulStop(ranks, rendezvous, Stopping(), math.inf)
            witness = witness_of(ranks, rendezvous.client, partial(write_if_possible, logs))
            stack.callback(witness.close)
            monitor = Monitor(
                ranks, rendezvous, stop, wait=output.read, followers_seconds=timeouts.FOLLOWERS_SECONDS, witness=witness
            )
            verdict = monitor.watch()
        finally:
            outcomes = end(ranks, output, rendezvous.start)
        if verdict.cause is Cause.STORE_LOST:
            raise WorkerFailed(verdict.message)
        returned = results(outcomes, rendezvous.reports(), node, "" if logs is None else str(logs))
    return [shipping.unship(result) for result in returned]


def refuse_within_a_rank(environ: Mapping[str, str]) -> None:
    """Raise ClusterError if this process is a rank itself, of any launcher."""
    if shipping.loading:
        module, place = _caller()
        raise shipping.CalledWhileImported(
            f"fleet_train.spawn is called at the top level of {module} ({place}), which every rank imports to find "
            f'{shipping.loading}; put the call below `if __name__ == "__main__":`, or into a function'
        )
    number = environ.get("PADDLE_TRAINER_ID", "")
    if environ.get("FLEET_TRAIN_STORE") or environ.get("PADDLE_TRAINERS_NUM", "1") not in ("", "1"):
        raise ClusterError(
            f"fleet_train.spawn was called in rank {number or '?'} of a job, and a rank cannot start ranks; "
            "call it from a script or a notebook that no launcher has started, or call the function itself here"
        )
    started = detect(environ)
    if started is not None and started.count > 1:
        raise ClusterError(
            f"fleet_train.spawn was called in process {started.index} of {started.count} that {started.engine} has "
            "started, each of which would start a separate job; call fleet.init in them instead, or set "
            "FLEET_TRAIN_ENGINE=none if that is intended"
        )


def _caller() -> tuple[str, str]:
    """(module, file:line) of the code that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("fleet_train."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "?")), f"{frame.f_code.co_filename}:{frame.f_lineno}"


_HOST = "127.0.0.1"
_ROUND = 0


@contextmanager
def rendezvous_of(nprocs: int, devices: tuple[str, ...] | None) -> Iterator[tuple[Node, Access, Rendezvous]]:
    """A store on this machine's loopback address, on a port chosen by the kernel, with a secret of its own, so that two
    spawns cannot interfere; and this process in it, as the only launcher of the job."""
    access = Access(f"spawn-{secrets.token_hex(6)}", secrets.token_hex(24).encode(), _HOST)
    with ExitStack() as stack:
        server = StoreServer(_HOST, 0, access, members=nprocs + 1).start()
        stack.callback(server.stop)
        server.open_root(str(_ROUND))
        # The ranks' own ports are only names: the store alone listens, on the one after them.
        node = Node((_HOST,), 0, server.port - nprocs, nprocs, devices, "lo")
        rendezvous = Rendezvous(node, _ROUND, timeouts.STORE_ANSWER_SECONDS, access=access)
        stack.callback(rendezvous.close)
        rendezvous.join({}, 0, timeouts.STORE_ANSWER_SECONDS)
        yield node, access, rendezvous


def environs(base: LaunchEnvironment, node: Node, access: Access, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """One environment per rank: the same as under the launcher, and nothing of another job."""
    common = base.over({name: value for name, value in environ.items() if name not in (SECRET, SECRET_FILE)})
    common |= {
        "FLEET_TRAIN_STORE": f"{node.store_endpoint}/{_ROUND}",
        "FLEET_TRAIN_ATTEMPT": "0",
        "FLEET_TRAIN_LAUNCHED": secrets.token_hex(8),
        JOB_ID: access.job,
        SECRET: (access.secret or b"").decode(),
        "PYTHONUNBUFFERED": "1",
    }
    # By position among the visible GPUs: CUDA_VISIBLE_DEVICES stays as it is.
    on_gpu = node.devices is not None
    return [common | variables_of_rank(node.cluster(index), on_gpu=on_gpu, selected_gpu=index) for index in node.ranks]


def _start(ranks: Ranks[SpawnedRank]) -> None:
    """Start them all. A Ctrl-C meanwhile is raised once all can be stopped."""
    with interrupts_held():
        try:
            ranks.start()
        except OSError as error:
            index, count = len(ranks.started), ranks.node.processes
            raise ClusterError(f"rank {index} of {count} could not be started: {error}") from error


def _greeting(train: Callable[..., Any]) -> dict[str, Any]:
    """Sent to a rank with the function: where modules are found, and the source of cells for tracebacks."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return {
        "train": shipping.name_of(train),
        "path": path,
        "argv": [str(word) for word in sys.argv],
        "sources": shipping.sources(),
    }


def _log_dir(log_dir: str | os.PathLike[str] | None) -> Path | None:
    if log_dir is None:
        return None
    path = Path(log_dir)
    check_log_dir(path, "log_dir")
    path.mkdir(parents=True, exist_ok=True)
    return path.absolute()


_MOST_RANKS = 1024


def check_call(train: Any, args: Any) -> tuple[Any, ...]:
    """The arguments as a tuple. Raises ClusterError if ``train(*args)`` cannot be called."""
    if not callable(train):
        raise ClusterError(
            f"fleet_train.spawn was given {train!r}, which is not a function; give the function itself, as in "
            "spawn(train), not what it returns, as in spawn(train())"
        )
    name = name_of(train)
    if inspect.iscoroutinefunction(train) or inspect.isgeneratorfunction(train):
        raise ClusterError(
            f"{name} is an async function or a generator; spawn takes a function that trains and returns"
        )
    if not isinstance(args, (tuple, list)):
        raise ClusterError(f"args={args!r} is not a tuple; one argument is written as args=(value,)")
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # written in C: the call itself will raise
        return tuple(args)
    try:
        signature.bind(*args)
    except TypeError as error:
        raise ClusterError(
            f"{name}{signature} cannot be called with args={_counted(args)}: {error}{_wants_its_rank(signature, args)}"
        ) from None
    return tuple(args)


def _counted(args: Any) -> str:
    return "()" if not args else f"({', '.join(type(value).__name__ for value in args)}{',' if len(args) == 1 else ''})"


def _wants_its_rank(signature: inspect.Signature, args: Any) -> str:
    """A hint for functions written for ``torch.multiprocessing.spawn``, which passes the rank first."""
    try:
        signature.bind(0, *args)
    except TypeError:
        return ""
    return "; spawn passes a function its args and no rank: get it from fleet.worker_index() or PADDLE_TRAINER_ID"


def check_ranks(nprocs: Any, machine: Machine) -> tuple[str, ...] | None:
    """The devices of the ranks; None on a build without GPU code. Raises ClusterError for an invalid number."""
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise ClusterError(f"nprocs={nprocs!r} is not a whole number; it is how many ranks to start on this machine")
    if nprocs < 1:
        raise ClusterError(f"nprocs={nprocs} is too few; give 1 or more, the number of ranks to start on this machine")
    if nprocs > _MOST_RANKS:
        raise ClusterError(f"nprocs={nprocs} is more than the limit of {_MOST_RANKS} ranks on one machine")
    if not machine.gpus:
        return None
    if nprocs > len(machine.gpus):
        raise ClusterError(
            f"nprocs={nprocs}, but the visible GPUs are {','.join(machine.gpus)} ({len(machine.gpus)}): there is one "
            "rank per GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return machine.gpus[:nprocs]


def check_seconds(name: str, value: Any) -> float:
    """A bound in seconds. Raises ClusterError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1_000_000:
        raise ClusterError(f"{name}={value!r} is not a number of seconds above 0, up to 1000000")
    return float(value)


def profile_of(strategy: Any) -> Any:
    """The profile; None for None. Raises ProfileError, and ClusterError for anything but a strategy."""
    if strategy is None:
        return None
    from fleet_train.convert.strategy import DistributedStrategy
    from fleet_train.profile import Profile, load_profile

    if isinstance(strategy, (str, os.PathLike)):
        return load_profile(os.fspath(strategy))
    if isinstance(strategy, Profile):
        return strategy
    if isinstance(strategy, DistributedStrategy):
        return strategy.to_profile()
    if type(strategy).__name__ == "DistributedStrategy":  # Paddle's own
        return DistributedStrategy.from_stock(strategy).to_profile()
    raise ClusterError(
        f"strategy={shown(strategy)}: it takes a profile's name (python -m fleet_train profiles lists them), the path "
        "of a YAML file, or a fleet_train.DistributedStrategy"
    )
