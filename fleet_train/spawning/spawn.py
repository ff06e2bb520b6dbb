"""``fleet_train.spawn``: call a function in several ranks on this machine, and return their results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fleet_train.cluster.defaults import DEFAULT_JOIN_TIMEOUT_SECONDS
from fleet_train.errors import ClusterError
from fleet_train.launch.agent.prepare import check_log_dir, check_paddle, import_path_for_ranks
from fleet_train.launch.spec.machine import Machine, look_around
from fleet_train.launch.spec.node import Node
from fleet_train.launch.spec.worker_environment import LaunchEnvironment, Wanted, build_environment
from fleet_train.launch.workers.worker_main import log_name
from fleet_train.spawning import inside, shipping
from fleet_train.spawning.channel import packed
from fleet_train.spawning.checks import check_call, check_ranks, check_seconds
from fleet_train.spawning.environment import environs
from fleet_train.spawning.outcome import results
from fleet_train.spawning.rank_process import RankProcess
from fleet_train.spawning.ranks import Ranks, interrupts_held, show
from fleet_train.spawning.store import HOST, SpawnStore
from fleet_train.spawning.strategies import profile_of


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
    inside.refuse_within_a_rank(os.environ)
    arguments = check_call(train, args)
    machine = look_around(os.environ)
    devices = check_ranks(nprocs, machine)
    timeout_seconds = check_seconds("join_timeout_seconds", join_timeout_seconds)
    logs = _log_dir(log_dir)
    profile = profile_of(strategy)
    wanted = _wanted(profile, machine, timeout_seconds)
    body = shipping.ship(train, arguments, profile)
    with ExitStack() as stack:
        store = SpawnStore(nprocs)
        stack.callback(store.close)
        # The ranks' own ports are only names: the store alone listens, on the one after them.
        node = Node((HOST,), 0, store.port - nprocs, nprocs, devices, "lo")
        base = build_environment(node, machine, wanted, os.environ)
        _say_kept(base)
        greeting = _greeting(train)
        ranks = Ranks(store, show)
        try:
            _start(ranks, environs(base, node, store, os.environ), greeting, body, logs)
            ranks.wait()
        finally:
            outcomes = ranks.end()
        found = results(outcomes, ranks.reports, node, "" if logs is None else str(logs))
    return [shipping.unship(result) for result in found]


def _start(
    ranks: Ranks, every: Sequence[Mapping[str, str]], greeting: dict[str, Any], body: bytes, logs: Path | None
) -> None:
    """Start them all. A Ctrl-C meanwhile is raised once all can be stopped."""
    with interrupts_held():
        for index, environ in enumerate(every):
            log = None if logs is None else logs / log_name(index)
            try:
                ranks.add(RankProcess(index, environ, packed(greeting | {"rank": index}, body), log))
            except OSError as error:
                raise ClusterError(f"rank {index} of {len(every)} could not be started: {error}") from error


def _greeting(train: Callable[..., Any]) -> dict[str, Any]:
    """Sent to a rank with the function: where modules are found, and the source of cells for tracebacks."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return {
        "train": shipping.name_of(train),
        "path": path,
        "argv": [str(word) for word in sys.argv],
        "sources": shipping.sources(),
    }


def _wanted(profile: Any, machine: Machine, timeout_seconds: float) -> Wanted:
    """The settings of the ranks' environment."""
    check_paddle(machine, profile)
    return Wanted(
        profile.worker_environment() if profile else {},
        None,
        timeout_seconds,
        import_path_for_ranks(),
        hidden=frozenset(profile.environment) if profile else frozenset(),
    )


def _log_dir(log_dir: str | os.PathLike[str] | None) -> Path | None:
    if log_dir is None:
        return None
    path = Path(log_dir)
    check_log_dir(path)
    path.mkdir(parents=True, exist_ok=True)
    return path.absolute()


def _say_kept(base: LaunchEnvironment) -> None:
    if base.kept:
        names = ", ".join(base.kept)
        show(f"fleet_train: {names}: the environment's value is used, not the profile's; unset it to use that\n")
