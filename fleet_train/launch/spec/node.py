"""Combines the request and this machine into one checked description of this node in the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fleet_train.cluster import network
from fleet_train.cluster.hosts import refuse_repeated
from fleet_train.errors import ClusterError
from fleet_train.launch.spec.machine import Machine
from fleet_train.launch.spec.request import DEFAULT_HOST, LaunchRequest

_LAST_PORT = 65535


@dataclass(frozen=True)
class Node:
    """This machine as a node of the job. ``devices`` is None where processes have only a number (CPU)."""

    addresses: tuple[str, ...]  # of all nodes, in the order of ranks
    index: int
    started_port: int
    processes: int
    devices: tuple[str, ...] | None
    interface: str | None
    leader: int = 0
    """The node of the leading launcher, to which all connect: its position in ``addresses``."""
    hosts: tuple[str, ...] = ()
    """The names of the nodes, if these stay the same when an address changes. Empty: addresses are fixed."""
    numbers: tuple[int, ...] = ()
    """If ``addresses`` are a part of --cluster_node_ips: their positions there. Empty: all of it."""

    @property
    def address(self) -> str:
        return self.addresses[self.index]

    def host(self, index: int) -> str:
        """Its permanent identity: name or address."""
        return self.hosts[index] if self.hosts else self.addresses[index]

    @property
    def every_host(self) -> tuple[str, ...]:
        return self.hosts or self.addresses

    def with_addresses(self, addresses: tuple[str, ...]) -> Node:
        """The same nodes at their current addresses."""
        return replace(self, addresses=addresses)

    @property
    def is_leader(self) -> bool:
        return self.index == self.leader

    @property
    def world_size(self) -> int:
        return len(self.addresses) * self.processes

    @property
    def store_port(self) -> int:
        return self.started_port + self.processes

    @property
    def store_endpoint(self) -> str:
        """Where the leader's store listens; by name if the node has one, so that it is found at a new address."""
        return self.store_of(self.leader)

    def store_of(self, index: int) -> str:
        return f"{self.host(index)}:{self.store_port}"

    @property
    def ranks(self) -> range:
        """The ranks that run on this node, in the order of their local index."""
        return range(self.index * self.processes, (self.index + 1) * self.processes)

    def among(self, nodes: tuple[int, ...]) -> Node:
        """This node in a job of these nodes only (positions in ``addresses``), which must contain it
        and the leader."""
        addresses = tuple(self.addresses[i] for i in nodes)
        hosts = tuple(self.hosts[i] for i in nodes) if self.hosts else ()
        leader = nodes.index(self.leader)
        return replace(
            self, addresses=addresses, hosts=hosts, index=nodes.index(self.index), leader=leader, numbers=nodes
        )

    def led_by(self, leader: int) -> Node:
        return replace(self, leader=leader)

    def describe(self, index: int | None = None) -> str:
        index = self.index if index is None else index
        return f"node {self.numbers[index] if self.numbers else index} ({self.addresses[index]})"


def place(request: LaunchRequest, machine: Machine) -> Node:
    """The node that the request describes on this machine. Raises ClusterError; resolves host names only."""
    hosts = request.hosts or (DEFAULT_HOST,)
    addresses = tuple(network.resolve(host) for host in hosts)
    check_addresses(hosts, addresses)
    index = choose_node(hosts, addresses, request.node_host, machine.addresses)
    processes, devices = choose_processes(request.selected_gpus, request.processes_per_node, machine.gpus)
    check_port_range(request.first_port, processes)
    if request.ports_per_node is not None and processes > request.ports_per_node:
        raise ClusterError(
            f"TRAINER_PORTS_NUM={request.ports_per_node} is too few for {processes} processes per node, each of which "
            "needs a port; request more ports or start fewer processes"
        )
    interface = choose_interface(addresses, index, machine, network.interface_towards)
    names = hosts if request.by_name else ()
    return Node(addresses, index, request.first_port, processes, devices, interface, hosts=names)


def check_addresses(hosts: tuple[str, ...], addresses: tuple[str, ...]) -> None:
    """Several nodes must be distinct and reachable from each other."""
    if len(addresses) == 1:
        return
    given = f"--cluster_node_ips={','.join(hosts)}"
    refuse_repeated(addresses, given, "after resolving names each node must have an address of its own")
    if DEFAULT_HOST in addresses:
        raise ClusterError(
            f"{given}: {DEFAULT_HOST} means another machine on every node (Paddle's launcher refuses it too); give "
            "each node's address in the network, or 127.0.0.2,127.0.0.3 for two nodes on this one machine"
        )
    loopback = [f"{h} = {a}" for h, a in zip(hosts, addresses, strict=True) if network.is_loopback(a)]
    if loopback and len(loopback) < len(addresses):
        raise ClusterError(
            f"{given}: {', '.join(loopback)} can be reached from this machine only, the others are in a network; give "
            "the address in the network (/etc/hosts may map a host name to a 127.* address)"
        )


def choose_node(hosts: tuple[str, ...], addresses: tuple[str, ...], asked: str | None, local: tuple[str, ...]) -> int:
    """Which of the listed nodes this machine is. Raises ClusterError with its addresses."""
    mine = f"this machine has {', '.join(local) or 'no IPv4 address'}"
    if asked is None:
        matching = [i for i, address in enumerate(addresses) if network.is_local(address, local)]
        if len(matching) == 1:
            return matching[0]
        found = "none" if not matching else ", ".join(addresses[i] for i in matching)
        raise ClusterError(
            f"cannot tell which of the nodes {','.join(hosts)} this machine is: {found} of them "
            f"{'is' if not matching else 'are'} its own ({mine}); add --node_ip=<this machine's address>"
        )
    address = asked if asked in addresses else network.resolve(asked)
    if address not in addresses:
        raise ClusterError(
            f"--node_ip={asked} is not among --cluster_node_ips={','.join(hosts)}; every node is started with the same "
            f"list and with its own address from it ({mine})"
        )
    if not network.is_local(address, local):
        raise ClusterError(
            f"--node_ip={asked} is not an address of this machine: {mine}; --node_ip must differ on every machine"
        )
    return addresses.index(address)


def choose_processes(
    selected: tuple[str, ...] | None, asked: int | None, gpus: tuple[str, ...] | None
) -> tuple[int, tuple[str, ...] | None]:
    """(processes, devices). Without GPUs in the build, ``--selected_gpus=0,1`` gives the number of processes."""
    if asked is not None and asked < 1:
        raise ClusterError(f"--nproc_per_node={asked} is too few; a node runs at least 1 process")
    if selected and asked and len(selected) != asked:
        raise ClusterError(
            f"--selected_gpus={','.join(selected)} names {len(selected)} devices, but --nproc_per_node={asked}; there "
            "is one process per device, so give one of the two flags, or numbers that agree"
        )
    if gpus is None:
        return (len(selected) if selected else asked or 1), None
    if not gpus:
        if selected:
            raise ClusterError(
                f"--selected_gpus={','.join(selected)}: this machine has no visible GPU; to train on its processors "
                f"use --nproc_per_node={len(selected)}"
            )
        return asked or 1, None
    devices = selected or gpus[: asked or len(gpus)]
    missing = [device for device in devices if device not in gpus]
    if missing or (asked or 0) > len(gpus):
        wanted = f"--selected_gpus={','.join(devices)}" if missing else f"--nproc_per_node={asked}"
        raise ClusterError(f"{wanted}: the visible GPUs are {','.join(gpus)} (see nvidia-smi and CUDA_VISIBLE_DEVICES)")
    return len(devices), devices


def check_port_range(started_port: int, processes: int) -> None:
    if not 1 <= started_port <= _LAST_PORT - processes:
        raise ClusterError(
            f"--started_port={started_port}: with {processes} processes per node the ports {started_port} to "
            f"{started_port + processes} are used (the last one by the job store); they must lie in 1 to {_LAST_PORT}"
        )


def choose_interface(
    addresses: tuple[str, ...], index: int, machine: Machine, towards: Callable[[str], str | None]
) -> str | None:
    """The interface to the other nodes: by route, not by name; names differ between machines.

    If the routes differ (or there is none), the interface of this node's own address decides.
    """
    own = network.interface_of(addresses[index], machine.interfaces)
    routes = {towards(address) for i, address in enumerate(addresses) if i != index}
    if len(routes) == 1 and None not in routes:
        return routes.pop()
    return own


def check_ports(node: Node) -> None:
    """The ports that this node will listen on must be free now. Raises ClusterError with the process that uses one."""
    wanted = [(port, f"rank {rank}") for port, rank in enumerate(node.ranks, node.started_port)]
    wanted.append((node.store_port, "the job store"))
    for port, purpose in wanted:
        if not network.port_is_free(node.address, port):
            raise ClusterError(
                f"port {port} on {node.address}, which {purpose} needs (--started_port={node.started_port}), is in use "
                f"by {network.port_owner(port, node.address)}; end it or choose another --started_port on every node"
            )
