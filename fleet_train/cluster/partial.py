"""Ranks that an engine started: each knows its own number, and where rank 0 is. They exchange the rest.

Rank 0 hosts the job's store at the address that all know; each rank publishes its own address there, and all read the
list. The job uses the same store afterwards.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fleet_train.cluster import network
from fleet_train.cluster.cluster import Cluster, Rank
from fleet_train.cluster.engines import MASTER, MeetingPoint, locate
from fleet_train.cluster.started import Started
from fleet_train.cluster.store.access import JOB_ID, SECRET, SECRET_FILE, Access
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.host import BindAddress, StoreHost
from fleet_train.cluster.store.reports import reports_of
from fleet_train.errors import ClusterError, FleetTrainError

_ROUND = "arrival"
_EVERY_ADDRESS = "0.0.0.0"


@dataclass(frozen=True)
class PartialCluster:
    """One rank of a job whose other ranks' addresses are not known yet."""

    started: Started

    @property
    def rank(self) -> int:
        return self.started.index

    @property
    def world_size(self) -> int:
        return self.started.count

    @property
    def local_rank(self) -> int:
        return self.started.local_index

    @property
    def formed_by(self) -> str:
        return self.started.engine

    def describe(self, rank: int) -> str:
        return f"rank {rank} (started by {self.formed_by})"


def complete(cluster: Cluster | PartialCluster, timeout_seconds: float) -> tuple[Cluster, StoreHost | None]:
    """Exchange addresses with all ranks; also returns the handle of the store that rank 0 hosts from now on.

    A complete cluster is returned unchanged. Raises JoinTimeout with the ranks that did not connect, ClusterError if
    rank 0's node cannot be found or is another machine than rank 0's.
    """
    if isinstance(cluster, Cluster):
        return cluster, None
    os.environ.setdefault(JOB_ID, cluster.started.job)
    point = locate(cluster.started, os.environ, timeout_seconds)
    if point.secret and not (os.environ.get(SECRET) or os.environ.get(SECRET_FILE)):
        os.environ[SECRET] = point.secret
    host = StoreHost(_root(cluster, point), os.environ[JOB_ID]) if cluster.rank == 0 else None
    try:
        arrivals = _exchange(cluster, point, timeout_seconds)
        return Cluster(ranks_of(arrivals, point.port), cluster.rank, formed_by=cluster.formed_by), host
    except BaseException:
        if host is not None:
            host.release()
        raise


def _exchange(cluster: PartialCluster, point: MeetingPoint, timeout_seconds: float) -> dict[int, Any]:
    own = own_address(cluster, point)
    client = StoreClient.connect(
        f"{point.master}:{point.port}/{_ROUND}",
        cluster.rank,
        timeout_seconds=timeout_seconds,
        describe=cluster.describe,
        access=Access.of(os.environ, own if point.hosts else ""),
    )
    try:
        seen = "" if network.is_loopback(point.master) else point.master
        arrival = [own, cluster.started.node, seen]
        arrivals = client.all_gather("addresses", arrival, cluster.world_size, timeout_seconds, "fleet.init")
        client.leave()
        return arrivals
    except FleetTrainError as error:  # report it to ranks that still wait
        this = Rank(cluster.rank, own, point.port, 0, cluster.local_rank)
        with suppress(FleetTrainError):
            for report in reports_of(error, this, cluster.describe(cluster.rank), "could not join"):
                client.fail(report.to_json())
        raise
    finally:
        client.close()


def own_address(cluster: PartialCluster, point: MeetingPoint) -> str:
    """This node's address on the route to rank 0's."""
    if point.hosts and cluster.started.node is not None:
        return point.hosts[cluster.started.node]
    if cluster.rank == 0:
        return point.master
    address = network.address_towards(point.master)
    if address is None:
        raise ClusterError(
            f"no route leads from this machine to {point.master}, where rank 0 is according to {cluster.formed_by}; "
            f"check the network, or name another address of rank 0's node with {MASTER}=host:port"
        )
    return address


def _root(cluster: PartialCluster, point: MeetingPoint) -> BindAddress:
    """The address at which rank 0 hosts the store. Raises ClusterError if it is not one of this machine's."""
    addresses = network.local_addresses()
    if not network.is_local(point.master, addresses):
        who = MASTER if os.environ.get(MASTER) else cluster.formed_by
        raise ClusterError(
            f"rank 0 runs here, but {who} says that it is on {point.master}, which is not one of this "
            f"machine's addresses ({', '.join(addresses)}); name rank 0's node with {MASTER}=host:port on all ranks"
        )
    listen = _EVERY_ADDRESS if point.is_alias else point.master
    return BindAddress(listen, point.port, list(point.hosts) or None, cluster.world_size)


def ranks_of(arrivals: Mapping[int, Sequence[Any]], first_port: int) -> tuple[Rank, ...]:
    """Ranks from what each published: [address, node's number or None, rank 0's address as it knows it].

    Nodes are numbered in the order of their first ranks. Raises ClusterError if some know their node's number and
    others do not.
    """
    numbered = [rank for rank, (_, node, _) in arrivals.items() if node is not None]
    if numbered and len(numbered) < len(arrivals):
        raise ClusterError(f"ranks {numbered} know their node's number and the others do not; start all the same way")
    seen = next((seen for rank, (_, _, seen) in sorted(arrivals.items()) if rank and seen), "")
    alias = arrivals[0][0] if seen and network.is_loopback(arrivals[0][0]) else None
    nodes: dict[Any, int] = {}
    locals_of: Counter[int] = Counter()
    ports_of: Counter[str] = Counter()
    ranks = []
    for rank, (address, number, _) in sorted(arrivals.items()):
        address = seen if address == alias else address
        node = nodes.setdefault(address if number is None else number, len(nodes))
        ranks.append(Rank(rank, address, first_port + ports_of[address], node, locals_of[node]))
        locals_of[node] += 1
        ports_of[address] += 1
    return tuple(ranks)
