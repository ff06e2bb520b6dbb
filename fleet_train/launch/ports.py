"""The ports of this node: those that the user has given must be free, and a machine alone takes free ones by itself.

A rank may use its port much later, or never, so that a look for free ports would not see it. Therefore each launcher
also takes a name for each of its ports, which the kernel gives to one process only, and frees when that ends.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import replace

from fleet_train.cluster import network
from fleet_train.errors import ClusterError
from fleet_train.launch.node import Node
from fleet_train.launch.request import LaunchRequest
from fleet_train.log import logger

_LAST_CHOSEN = 28169
"""Above are the ports of launchers that wait (`signpost`), and those of outgoing connections."""
_MOST_NAMES = 256
"""Of a launcher: each is an open file."""
_names: dict[tuple[str, int], int] = {}
"""(address, port) -> the file of this process that holds its name."""


def take_ports(node: Node, request: LaunchRequest) -> Node:
    """The node with ports that are free: a machine alone without --started_port takes the first that are. Raises
    ClusterError."""
    if len(node.addresses) > 1 or request.started_port is not None or request.ports_per_node is not None:
        check_ports(node)
        for port in _ports(node)[:_MOST_NAMES]:
            _take(node.address, port)
        return node
    first, why = node.started_port, ""
    while node.store_port <= _LAST_CHOSEN:
        taken = next(((port, who) for port in _ports(node) if (who := _user(node, port))), None)
        if taken is None:
            if why:
                logger.info(f"this job uses the ports {node.started_port} to {node.store_port} ({why})")
            return node
        give_back(node)
        port, who = taken
        why = why or f"{port} is in use by {who}"
        node = replace(node, started_port=port + 1)
    raise ClusterError(
        f"there are no {node.processes + 1} ports in a row from {first} to {_LAST_CHOSEN} free on {node.address}; end "
        "jobs that are not needed, or choose the first one with --started_port"
    )


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


def give_back(node: Node) -> None:
    """Free the names of this node's ports."""
    for port in _ports(node):
        if (held := _names.pop((node.address, port), None)) is not None:
            socket.close(held)


def _ports(node: Node) -> range:
    return range(node.started_port, node.store_port + 1)


def _user(node: Node, port: int) -> str:
    """Who uses a port; empty, and the name is ours, if nobody does."""
    if port - node.started_port < _MOST_NAMES and not _take(node.address, port):
        return "another launcher"
    return "" if network.port_is_free(node.address, port) else str(network.port_owner(port, node.address))


def _take(address: str, port: int) -> bool:
    """Whether no other launcher has the name of this port. In the namespace of the network, as the port itself."""
    if (address, port) in _names:
        return True
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0fleet_train {address}:{port}")
    except OSError as error:
        holder.close()
        return error.errno != errno.EADDRINUSE
    _names[address, port] = holder.detach()
    return True
