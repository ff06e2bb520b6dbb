"""A launch whose node list comes from the engine that started the launchers: Slurm, an operator, mpirun."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from fleet_train.cluster import network
from fleet_train.cluster.engines import Started, detect
from fleet_train.cluster.engines.peers import OWN_ALIASES, locate
from fleet_train.cluster.partial import PartialCluster, complete
from fleet_train.cluster.store.protocol.access import JOB_ID
from fleet_train.errors import ClusterError
from fleet_train.launch.rendezvous.round import Say
from fleet_train.launch.spec.request import LaunchRequest

_NAMES_PAUSE_SECONDS = 1.0
_SAY_EVERY_SECONDS = 10.0


def with_nodes_of_engine(request: LaunchRequest, environ: Mapping[str, str], say: Say) -> LaunchRequest:
    """The request completed by what its flags left open: nodes, this one, first port, job id, processes per node.

    Nothing changes if nodes were given, if no engine is found, or if it started one process. Raises ClusterError if
    an engine started several launchers on this node, or gives no usable information.
    """
    if request.hosts is not None or request.engine == "none":
        return request
    started = detect(environ, request.engine)
    if started is None:
        return request
    _refuse_several_here(started)
    say(started.in_words())
    if started.count == 1:
        return _alone(request, started)
    if started.hosts and not started.engine.startswith("Slurm"):
        _await_names(started, request.join_timeout_seconds, say)
        hosts, port, by_name = started.hosts, started.port, True
    else:
        (hosts, port), by_name = _addresses(started, environ, request.join_timeout_seconds), False
    return replace(
        request,
        hosts=hosts,
        node_host=request.node_host or hosts[started.index],
        by_name=by_name,
        started_port=request.started_port if request.started_port is not None else port,
        processes_per_node=_processes(request, started),
        restarts=started.restarts,
        run=started.run,
        job_id=request.job_id or environ.get(JOB_ID) or started.job,
    )


def _alone(request: LaunchRequest, started: Started) -> LaunchRequest:
    """The only node: no other has to find it."""
    return replace(
        request,
        started_port=request.started_port if request.started_port is not None else started.port,
        processes_per_node=_processes(request, started),
        restarts=started.restarts,
        run=started.run,
    )


def _processes(request: LaunchRequest, started: Started) -> int | None:
    given = request.processes_per_node is not None or request.selected_gpus is not None
    return request.processes_per_node if given else started.processes


def _refuse_several_here(started: Started) -> None:
    if (started.local_count or 1) > 1 or started.local_index > 0:
        raise ClusterError(
            f"{started.engine} started {started.local_count or 'several'} launchers on this node; a launcher "
            "starts its node's ranks itself: use one per node (srun --ntasks-per-node=1, mpirun -N 1) and give "
            "--nproc_per_node=N, or start the ranks without it: srun python train.py"
        )


def _addresses(
    started: Started, environ: Mapping[str, str], timeout_seconds: float
) -> tuple[tuple[str, ...], int | None]:
    """(address of every node, first port): from Slurm; otherwise the launchers exchange them."""
    if started.hosts:
        point = locate(started, environ, timeout_seconds)
        return _without_alias(point.hosts, started.index), point.port
    cluster, host = complete(PartialCluster(started), timeout_seconds)
    if host is not None:
        host.release()
    return tuple(rank.host for rank in cluster.ranks), cluster.ranks[0].port + 1


def _await_names(started: Started, timeout_seconds: float, say: Say) -> None:
    """A pod's name resolves once the pod runs: wait for those of all nodes. Raises ClusterError."""
    deadline, word_at = time.monotonic() + timeout_seconds, time.monotonic() + 2.0
    unknown = list(started.hosts)
    while True:
        unknown = [host for host in unknown if not network.is_known(host)]
        if not unknown:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise ClusterError(
                f"the names {', '.join(unknown[:5])} of {started.engine} are not known here after "
                f"{timeout_seconds:g} s (--join_timeout); its pods need a headless service, with "
                "publishNotReadyAddresses, and have to be running"
            )
        if time.monotonic() > word_at:
            say(f"waiting for the names of {len(unknown)} nodes, such as {unknown[0]} ({left:.0f} s more)")
            word_at = time.monotonic() + _SAY_EVERY_SECONDS
        time.sleep(_NAMES_PAUSE_SECONDS)


def _without_alias(addresses: tuple[str, ...], own: int) -> tuple[str, ...]:
    """Debian's /etc/hosts maps a machine's own name to 127.0.1.1: take the address that routes to the others."""
    others = [address for index, address in enumerate(addresses) if index != own and address not in OWN_ALIASES]
    if addresses[own] not in OWN_ALIASES or not others:
        return addresses
    found = network.address_towards(others[0]) or addresses[own]
    return (*addresses[:own], found, *addresses[own + 1 :])
