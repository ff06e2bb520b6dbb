"""Converts the addresses of Ray's workers to the environment of each rank. No Ray, no Paddle."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.cluster import network
from fleet_train.cluster.cluster import Cluster, from_endpoints
from fleet_train.cluster.store.access import JOB_ID, SECRET, SECRET_FILE
from fleet_train.launch.node import (
    Machine,
    Node,
    build_environment,
    choose_interface,
    look_around,
    variables_of_rank,
)
from fleet_train.spawning.rank_main import cause_reported, offer

_LAST_PORT = 65535


@dataclass(frozen=True)
class Attempt:
    """The settings of one attempt, the same for all workers."""

    job: str
    """Authenticates the connections of this attempt."""
    secret: str
    launched: str
    """The same in all attempts of one run: identifies its checkpoints."""
    number: int
    """0, 1, 2, ...; above 0, a trainer resumes."""
    join_timeout_seconds: float


def endpoints_of(places: Sequence[tuple[str, int]]) -> list[str]:
    """``host:port`` per worker from its address and a port that was free there; all different.

    Rank 0 (above 32 ranks, each node's first one) listens on its own; the others' only distinguish them.
    """
    taken: set[tuple[str, int]] = set()
    endpoints = []
    for address, port in places:
        while (address, port) in taken:
            port = port + 1 if port < _LAST_PORT else 1024
        taken.add((address, port))
        endpoints.append(f"{address}:{port}")
    return endpoints


def variables(
    endpoints: Sequence[str],
    rank: int,
    attempt: Attempt,
    profile_environment: Mapping[str, str],
    machine: Machine,
    environ: Mapping[str, str],
) -> tuple[dict[str, str], frozenset[str]]:
    """(variables to set for a rank, variables to remove). A user's own variables override advice."""
    cluster = Cluster(from_endpoints(list(endpoints)), rank, formed_by="Ray Train")
    node = _node(cluster, machine)
    base = build_environment(
        node, machine, environ, profile=profile_environment, join_timeout_seconds=attempt.join_timeout_seconds
    )
    ours = base.ours | variables_of_rank(cluster, on_gpu=node.devices is not None)
    ours |= {
        "FLEET_TRAIN_ATTEMPT": str(attempt.number),
        "FLEET_TRAIN_LAUNCHED": attempt.launched,
        JOB_ID: attempt.job,
        SECRET: attempt.secret,
    }
    del ours["FLEET_TRAIN_STORE"]  # rank 0 hosts it in a child process
    return ours, base.removed | {SECRET_FILE, "FLEET_TRAIN_STORE"}


def _node(cluster: Cluster, machine: Machine) -> Node:
    hosts = tuple(cluster.ranks[cluster.ranks_on_node(node)[0]].host for node in range(cluster.node_num))
    index = cluster.this.node_index
    interface = choose_interface(hosts, index, machine, network.interface_towards)
    local = len(cluster.ranks_on_node(index))
    # Ray shows each worker only its own GPU.
    return Node(hosts, index, cluster.this.port, local, machine.gpus or None, interface)


def become_rank(
    endpoints: Sequence[str], rank: int, attempt: Attempt, profile_environment: Mapping[str, str]
) -> tuple[str, ...]:
    """In a worker's process, before its training function is loaded: become this rank. Returns what was set."""
    ours, removed = variables(endpoints, rank, attempt, profile_environment, look_around(os.environ), os.environ)
    apply(os.environ, ours, removed)
    return tuple(sorted(ours))


def apply(environ: MutableMapping[str, str], ours: Mapping[str, str], removed: frozenset[str]) -> None:
    for name in removed:
        environ.pop(name, None)
    environ.update(ours)


class InWorker:
    """Wraps a worker's training function: the profile is its default, and a failure is reported to the other ranks.

    Ray catches errors of the function, so no hook of the interpreter would see them.
    """

    def __init__(self, profile: Any) -> None:
        self._profile = profile

    def __enter__(self) -> None:
        offer(self._profile)

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            cause = cause_reported(error)
            if cause is not error:  # the executor has turned it into a SystemError
                raise cause from error
        elif "fleet_train.convert.session" in sys.modules:
            sys.modules["fleet_train.convert.session"].end()
