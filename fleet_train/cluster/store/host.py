"""Hosts the rendezvous store in a small process next to rank 0, for launch forms without our launcher.

Not in rank 0 itself: Paddle holds the interpreter lock while it waits for peers in C++, and a store that shares that
lock could not respond during that time. The process ends by itself once its parent and all members are gone. In a job
of many ranks each node has one, next to its first rank; all but rank 0's are relays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_train import timeouts
from fleet_train.cluster.cluster import FAN_IN, Cluster, below, parent_of
from fleet_train.cluster.store.access import JOB_ID, Access, Callers, access_of
from fleet_train.cluster.store.client import close_after_fork
from fleet_train.errors import ClusterError

if TYPE_CHECKING:
    from fleet_train.cluster.store.server import StoreServer

_READY = "listening"


@dataclass(frozen=True)
class BindAddress:
    """Where a node's server listens and, unless it is the root, where its parent does."""

    host: str
    port: int
    hosts: list[str] | None
    """The addresses it accepts; None: every process that knows the job's id, or its secret."""
    members: int
    node: int = 0
    parent: str = ""
    below: str = "0"
    timeout_seconds: float = 300.0
    """How long a relay tries to reach its parent: that node's first rank may start much later."""

    @classmethod
    def of(cls, cluster: Cluster, timeout_seconds: float) -> BindAddress:
        firsts = [cluster.ranks[cluster.ranks_on_node(node)[0]] for node in range(cluster.node_num)]
        node = cluster.this.node_index
        hosts = list(dict.fromkeys(rank.host for rank in cluster.ranks))
        most = FAN_IN + max(FAN_IN, len(cluster.ranks_on_node(node)))
        place = cls(firsts[node].host, firsts[node].port, hosts, most, node, timeout_seconds=timeout_seconds)
        if node == 0 or not needs_relays(cluster):
            return place
        ranks = [cluster.ranks_on_node(index) for index in range(cluster.node_num)]
        return replace(place, parent=firsts[parent_of(node)].endpoint, below=hex(below(node, ranks)))


def needs_relays(cluster: Cluster) -> bool:
    """A few ranks connect to the root directly, which is the shortest path."""
    return cluster.world_size > FAN_IN and cluster.node_num > 1


def endpoint_of(cluster: Cluster) -> str:
    """The store's server for this rank."""
    if cluster.store_endpoint:
        return cluster.store_endpoint
    node = cluster.this.node_index if needs_relays(cluster) else 0
    return cluster.ranks[cluster.ranks_on_node(node)[0]].endpoint


def is_host(cluster: Cluster) -> bool:
    """Whether this rank hosts a server of the store: no launcher does, and it is the first of its node."""
    if cluster.store_endpoint:
        return False
    return cluster.rank == 0 or (needs_relays(cluster) and cluster.local_rank == 0)


class StoreHost:
    """The parent's handle. Raises ClusterError if the address cannot be bound, or the parent cannot be reached."""

    def __init__(self, place: BindAddress, job_id: str) -> None:
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "fleet_train.cluster.store.host", json.dumps(vars(place))]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), JOB_ID: job_id},
                # Ctrl-C reaches the ranks first; the store outlives them to name the root cause
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"the process of the rendezvous store cannot be started: {error}") from error
        close_after_fork(self)  # it ends with its parent; a child that the parent has forked must not hold it
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        self._process.stdout.close()
        if answer != _READY:
            self._process.wait()
            raise ClusterError(answer or f"the rendezvous store on {place.host}:{place.port} did not start")

    @classmethod
    def of(cls, cluster: Cluster, timeout_seconds: float) -> StoreHost:
        """For the node of this rank, in a cluster whose ranks are all known."""
        return cls(BindAddress.of(cluster, timeout_seconds), access_of(cluster).job)

    def release(self) -> None:
        """Let the process end once the members have left; does not wait for that."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    close_in_child = release


def _start(place: BindAddress) -> StoreServer:
    # Only the process that serves imports it, and asyncio with it: every rank imports this module.
    from fleet_train.cluster.store.relay import Parent
    from fleet_train.cluster.store.server import StoreServer

    access = Access.of(os.environ, place.host)
    callers = None if place.hosts is None else Callers(place.hosts)
    is_root = not place.parent
    server = StoreServer(place.host, place.port, access, callers, place.members, begins_namespaces=is_root).start()
    if is_root:
        server.open_root("")
        return server
    host, port = place.parent.rsplit(":", 1)
    machine = f"node {place.node} ({place.host})"
    server.open_relay(
        Parent(host, int(port), "", place.node, machine, int(place.below, 16), access), place.timeout_seconds
    )
    return server


def _serve(place: BindAddress) -> None:
    try:
        server = _start(place)
    except ClusterError as error:
        print(error, flush=True)
        return
    print(_READY, flush=True)
    sys.stdin.buffer.read()  # ends with the parent, however it ends
    deadline = time.monotonic() + timeouts.STORE_OUTLIVES_SECONDS
    quiet_since = None
    while time.monotonic() < deadline:
        if server.has_members():
            quiet_since = None
        elif quiet_since is None:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > timeouts.STORE_QUIET_SECONDS:
            break
        time.sleep(timeouts.STORE_POLL_SECONDS)
    server.stop()


if __name__ == "__main__":
    _serve(BindAddress(**json.loads(sys.argv[1])))
