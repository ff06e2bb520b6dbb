"""The examined nodes: from the flags, from the launcher that started this process, or from its engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from fleet_train.cluster import network
from fleet_train.cluster.at_import import launch_environment, parent_command
from fleet_train.cluster.cluster import Cluster, parse_hosts
from fleet_train.cluster.environment import cluster_from_environ
from fleet_train.cluster.partial import complete
from fleet_train.cluster.store.access import Access
from fleet_train.errors import ClusterError
from fleet_train.launch.node import check_addresses, check_port_range, choose_node, choose_processes, look_around
from fleet_train.launch.on_ranks import Where, is_rank
from fleet_train.launch.prepare import with_nodes_of_engine
from fleet_train.launch.request import LaunchRequest

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Participants:
    """``ports``: of each node, those that a job listens on. ``is_named``: this node by a name that resolves to 127.*"""

    addresses: tuple[str, ...]
    index: int
    ports: tuple[tuple[int, ...], ...]
    processes: int
    access: Access
    is_named: bool = False

    @property
    def address(self) -> str:
        return self.addresses[self.index]

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(index for index in range(len(self.addresses)) if index != self.index)

    @property
    def is_alone(self) -> bool:
        return len(self.addresses) == 1


def find(where: Where, join_timeout_seconds: float) -> Participants | None:
    """None for a process that its launcher started next to another one on the same node, which does the work.

    Raises ClusterError for flags or variables that describe no usable cluster.
    """
    if not is_rank(os.environ):
        return _of_flags(where, join_timeout_seconds)
    if where.is_given:
        raise ClusterError(
            "--nproc, --ips, --node_ip and --started_port describe the machines, but a launcher has started this "
            "process as one of its ranks: give them to the launcher"
        )
    return _of_rank(join_timeout_seconds)


def _of_rank(join_timeout_seconds: float) -> Participants | None:
    described = cluster_from_environ(launch_environment(), parent_command())
    cluster, host = complete(described, join_timeout_seconds)
    if host is not None:
        host.release()
    return of_cluster(cluster, os.environ) if cluster.local_rank == 0 else None


def of_cluster(cluster: Cluster, environ: Mapping[str, str]) -> Participants:
    """The nodes of a job's ranks, with the ports of the ranks."""
    nodes = [[cluster.ranks[rank] for rank in cluster.ranks_on_node(node)] for node in range(cluster.node_num)]
    addresses = tuple(network.resolve(ranks[0].host) for ranks in nodes)
    ports = tuple(tuple(rank.port for rank in ranks) for ranks in nodes)
    index = cluster.this.node_index
    return Participants(addresses, index, ports, len(nodes[index]), _access(environ, addresses, index))


def _of_flags(where: Where, join_timeout_seconds: float) -> Participants:
    request = LaunchRequest(
        command=("doctor",),
        hosts=parse_hosts(where.ips, "--ips") if where.ips is not None else None,
        node_host=where.node_ip,
        started_port=where.started_port,
        processes_per_node=where.nproc,
        join_timeout_seconds=join_timeout_seconds,
    )
    request = with_nodes_of_engine(request, os.environ)
    machine = look_around(os.environ)
    hosts = request.hosts or (LOOPBACK,)
    addresses, named = without_loopback_name(hosts, tuple(map(network.resolve, hosts)), where.node_ip)
    check_addresses(hosts, addresses)
    own_host = request.node_host if named is None else addresses[named]
    index = choose_node(hosts, addresses, own_host, machine.addresses)
    processes, _ = choose_processes(None, request.processes_per_node, machine.gpus)
    check_port_range(request.first_port, processes)
    ports = tuple(range(request.first_port, request.first_port + processes + 1))  # the ranks', and the job store's
    access = _access(os.environ, hosts, index, addresses[index])
    return Participants(addresses, index, (ports,) * len(addresses), processes, access, named == index)


def without_loopback_name(
    hosts: tuple[str, ...], addresses: tuple[str, ...], node_ip: str | None
) -> tuple[tuple[str, ...], int | None]:
    """A node of the list whose name resolves to 127.* here is this machine: give it the address on the route to the
    others; with its index, None if there is none. The wrong name is then a finding."""
    several = len(addresses) > 1
    aliases = [i for i, a in enumerate(addresses) if several and network.is_loopback(a) and hosts[i] != a]
    if len(aliases) != 1 or len(aliases) == len(addresses):
        return addresses, None
    (own,) = aliases
    if node_ip is not None and node_ip not in (hosts[own], addresses[own]):
        given = network.address_towards(addresses[1 - own if len(addresses) == 2 else own - 1])
        if node_ip != given:
            return addresses, None
    other = next(a for i, a in enumerate(addresses) if i != own)
    source = network.address_towards(other)
    if source is None:
        return addresses, None
    return (*addresses[:own], source, *addresses[own + 1 :]), own


def _access(environ: Mapping[str, str], hosts: tuple[str, ...], index: int, source: str = "") -> Access:
    digest = sha256("\0".join(hosts).encode(errors="replace")).hexdigest()[:10]
    access = Access.of(environ, source or hosts[index])
    # A job that runs under the same id is a different one: its store must not treat us as one of its members.
    return Access(f"doctor-{access.job or digest}", access.secret, access.source)
