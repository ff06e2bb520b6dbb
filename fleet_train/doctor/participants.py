"""The examined nodes: from the flags, from the launcher that started this process, or from its engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from hashlib import sha256

from fleet_train.cluster import network
from fleet_train.cluster.at_import import launch_environment, parent_command
from fleet_train.cluster.cluster import parse_nodes
from fleet_train.cluster.environment import cluster_from_environ
from fleet_train.cluster.partial import complete
from fleet_train.cluster.store.access import Access
from fleet_train.errors import ClusterError
from fleet_train.launch.node import Node, look_around, place
from fleet_train.launch.on_ranks import Where, is_rank
from fleet_train.launch.prepare import with_nodes_of_engine
from fleet_train.launch.request import DEFAULT_HOST, LaunchRequest


@dataclass(frozen=True)
class Participants:
    """The examined nodes. ``node``: this one among all; ``ports``: of each node, those that a job listens on.
    ``is_named``: this node by a name that resolves to 127.*"""

    node: Node
    ports: tuple[tuple[int, ...], ...]
    access: Access
    is_named: bool = False

    @property
    def own_ports(self) -> tuple[int, ...]:
        return self.ports[self.node.index]


def find(where: Where, join_timeout_seconds: float) -> Participants | None:
    """Find the examined nodes. None for a process that its launcher started next to another one of the node, which does
    the work.

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
    if cluster.local_rank:
        return None
    nodes = [[cluster.ranks[rank] for rank in cluster.ranks_on_node(node)] for node in range(cluster.node_num)]
    addresses = tuple(network.resolve(ranks[0].host) for ranks in nodes)
    ports = tuple(tuple(rank.port for rank in ranks) for ranks in nodes)
    index = cluster.this.node_index
    each = tuple(map(len, nodes))
    counts = each if len(set(each)) > 1 else ()
    node = Node(addresses, index, ports[index][0], each[index], None, None, counts=counts)
    return Participants(node, ports, _access(addresses, node))


def _of_flags(where: Where, join_timeout_seconds: float) -> Participants:
    hosts, counts = parse_nodes(where.ips, "--ips") if where.ips is not None else (None, ())
    request = LaunchRequest(
        command=("doctor",),
        hosts=hosts,
        counts=counts,
        node_host=where.node_ip,
        started_port=where.started_port,
        processes_per_node=where.nproc,
        join_timeout_seconds=join_timeout_seconds,
    )
    request = with_nodes_of_engine(request, os.environ)
    hosts = request.hosts or (DEFAULT_HOST,)
    addresses, named = without_loopback_name(hosts, tuple(map(network.resolve, hosts)), where.node_ip)
    if named is not None:
        own = addresses[named]
        request = replace(request, hosts=(*hosts[:named], own, *hosts[named + 1 :]), node_host=own)
    node = place(request, look_around(os.environ))
    ports = tuple(tuple(range(node.started_port, node.store_port_of(each) + 1)) for each in range(len(hosts)))
    return Participants(node, ports, _access(hosts, node), named == node.index)


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


def _access(hosts: tuple[str, ...], node: Node) -> Access:
    digest = sha256("\0".join(hosts).encode(errors="replace")).hexdigest()[:10]
    access = Access.of(os.environ, node.address)
    # A job that runs under the same id is a different one: its store must not treat us as one of its members.
    return Access(f"doctor-{access.job or digest}", access.secret, access.source)
