"""The members of a job: hosts -> ranks, and the tree of its nodes' servers, as pure arithmetic."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fleet_train.errors import ClusterError

# Numbers that flags, variables and help texts share.
DEFAULT_STARTED_PORT = 6170
DEFAULT_JOIN_TIMEOUT_SECONDS = 300.0
MOST_SECONDS = 1_000_000.0
"""The longest time that any option accepts: 11 days; sockets accept no timeout of more than 24."""
FAN_IN = 32
"""How many servers of the rendezvous store connect to one; up to this many ranks connect to its root directly."""


@dataclass(frozen=True)
class Rank:
    """One process of the job."""

    index: int
    host: str
    port: int
    node_index: int
    local_index: int

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Cluster:
    """All ranks of the job, and which of them this process is."""

    ranks: tuple[Rank, ...]
    rank: int
    store_endpoint: str = ""
    """The rendezvous store that a launcher hosts; empty = rank 0 hosts it on its own endpoint."""
    formed_by: str = "one process"
    """The launch form or variables that described this cluster, in words for messages."""

    @classmethod
    def single(cls) -> Cluster:
        return cls((Rank(0, "127.0.0.1", 0, 0, 0),), 0)

    @classmethod
    def imagined(cls, nodes: int, ranks_per_node: int) -> Cluster:
        """A hypothetical cluster for planning: hosts are called node0, node1, ..."""
        if nodes < 1 or ranks_per_node < 1:
            raise ClusterError(f"nodes={nodes}, ranks_per_node={ranks_per_node}: both must be at least 1")
        hosts = [f"node{i}" for i in range(nodes)]
        return cls(assign(hosts, ranks_per_node, 6170), 0, formed_by="imagined")

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @cached_property
    def node_num(self) -> int:
        return 1 + max(rank.node_index for rank in self.ranks)

    @property
    def this(self) -> Rank:
        return self.ranks[self.rank]

    @property
    def local_rank(self) -> int:
        return self.this.local_index

    @property
    def endpoints(self) -> list[str]:
        return [rank.endpoint for rank in self.ranks]

    def ranks_on_node(self, node_index: int) -> list[int]:
        return [rank.index for rank in self.ranks if rank.node_index == node_index]

    def describe(self, rank: int) -> str:
        """``rank 3 (10.0.0.2:6171)``; a rank outside the job is described by its number only."""
        if not 0 <= rank < self.world_size:
            return f"rank {rank}"
        return f"rank {rank} ({self.ranks[rank].endpoint})"


def assign(hosts: Sequence[str], ranks_per_node: int | Sequence[int], started_port: int) -> tuple[Rank, ...]:
    """Ranks in the order of the host list, ``ranks_per_node`` on each (or on one after the other), with ports from
    ``started_port`` up."""
    counts = [ranks_per_node] * len(hosts) if isinstance(ranks_per_node, int) else ranks_per_node
    places = [(node, local) for node, count in zip(range(len(hosts)), counts, strict=True) for local in range(count)]
    return tuple(
        Rank(rank, hosts[node], started_port + local, node, local) for rank, (node, local) in enumerate(places)
    )


def from_endpoints(endpoints: Sequence[str], node_num: int | None = None) -> tuple[Rank, ...]:
    """Ranks from ``host:port`` texts; adjacent ones on one host form a node.

    ``node_num`` splits a host evenly when several launchers share it. Raises ClusterError for a text without a port
    and for an endpoint that is named twice.
    """
    pairs = [_split(endpoint) for endpoint in endpoints]
    twice = sorted({endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1})
    if twice:
        raise ClusterError(f"endpoint {', '.join(twice)} is given for two ranks; every rank needs its own host:port")
    nodes = _node_indices([host for host, _ in pairs], node_num)
    local: dict[int, int] = {}
    ranks = []
    for index, ((host, port), node) in enumerate(zip(pairs, nodes, strict=True)):
        ranks.append(Rank(index, host, port, node, local.get(node, 0)))
        local[node] = local.get(node, 0) + 1
    return tuple(ranks)


def _node_indices(hosts: list[str], node_num: int | None) -> list[int]:
    distinct = list(dict.fromkeys(hosts))
    if node_num and node_num > len(distinct) and len(hosts) % node_num == 0:
        return [index // (len(hosts) // node_num) for index in range(len(hosts))]
    return [distinct.index(host) for host in hosts]


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.strip().rpartition(":")
    if not host or not is_number(port):
        raise ClusterError(f"endpoint {endpoint!r} is not of the form host:port")
    if not may_be_host(host):
        raise ClusterError(f"endpoint {endpoint!r}: {host!r} {NO_HOST}")
    return host, int(port)


NO_HOST = "is no host name: between two dots there are 1 to 63 characters"


def may_be_host(text: str) -> bool:
    """Whether the resolver can be asked for a text: it raises a UnicodeError for ``a..b``."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def parent_of(node: int, fan_in: int = FAN_IN) -> int:
    """The parent of a node in the tree that the nodes of a job form in their order, with node 0 as its root."""
    return (node - 1) // fan_in


def subtree(node: int, nodes: int, fan_in: int = FAN_IN) -> Iterator[int]:
    """The node and all nodes below it."""
    first = last = node
    while first < nodes:
        yield from range(first, min(last, nodes - 1) + 1)
        first, last = first * fan_in + 1, last * fan_in + fan_in


def below(node: int, ranks: Sequence[Sequence[int]], fan_in: int = FAN_IN) -> int:
    """The ranks (bits of an integer) of a node's subtree; ``ranks``: of each node."""
    return sum(1 << rank for each in subtree(node, len(ranks), fan_in) for rank in ranks[each])


def parse_hosts(text: str, flag: str = "--cluster_node_ips") -> tuple[str, ...]:
    """``"10.0.0.1, 10.0.0.2"`` -> ``("10.0.0.1", "10.0.0.2")``. Raises ClusterError for a gap or a repetition."""
    hosts, counts = parse_nodes(text, flag)
    if counts:
        raise ClusterError(f"{flag}={text}: it takes addresses only; processes per node are --nproc_per_node")
    return hosts


MOST_PROCESSES = 1000
"""Of a node. What is larger behind an address reads as a port."""


def parse_nodes(text: str, flag: str = "--cluster_node_ips") -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """``"10.0.0.1,10.0.0.2:2"`` -> ``(("10.0.0.1", "10.0.0.2"), (None, 2))``: hosts, and the numbers of their
    processes; no numbers at all if none is given. Raises ClusterError for a gap, a repetition or a port."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ClusterError(f"{flag}={text}: there is a comma with no address on one side; write A,B,C")
    hosts, counts = zip(*(_host_and_count(part, f"{flag}={text}") for part in parts), strict=True)
    rule = "each node is listed once; a node's number of processes is written behind it: A,B:2"
    refuse_repeated(hosts, f"{flag}={text}", rule)
    return hosts, counts if any(counts) else ()


def _host_and_count(part: str, given: str) -> tuple[str, int | None]:
    bracketed = re.fullmatch(r"\[([^]]*)\](?::(.*))?", part)
    host, number = bracketed.groups() if bracketed else (part, None)
    if bracketed is None and part.count(":") == 1:
        host, _, number = part.partition(":")
    if number is None:
        return host, None
    if not host or not is_number(number) or not 1 <= int(number) <= MOST_PROCESSES:
        raise ClusterError(
            f"{given}: {part} is not an address with its number of processes, such as 10.0.0.2:2, of 1 "
            f"to {MOST_PROCESSES}; ports come from --started_port"
        )
    return host, int(number)


def is_number(text: str) -> bool:
    """Whether a text is a number with digits 0 to 9, short enough for a port, a rank or a device."""
    return text.isascii() and text.isdigit() and len(text) <= 9


def refuse_repeated(items: tuple[str, ...], given: str, rule: str) -> None:
    repeated = [item for item, count in Counter(items).items() if count > 1]
    if repeated:
        raise ClusterError(f"{given}: {', '.join(repeated)} is listed more than once; {rule}")
