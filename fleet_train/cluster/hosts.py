"""A list of nodes in a flag."""

from __future__ import annotations

from collections import Counter

from fleet_train.errors import ClusterError


def parse_hosts(text: str, flag: str = "--cluster_node_ips") -> tuple[str, ...]:
    """``"10.0.0.1, 10.0.0.2"`` -> ``("10.0.0.1", "10.0.0.2")``. Raises ClusterError for a gap or a repetition."""
    hosts = tuple(part.strip() for part in text.split(","))
    if not all(hosts):
        raise ClusterError(f"{flag}={text}: there is a comma with no address on one side; write A,B,C")
    for host in hosts:
        if ":" in host and host.count(":") == 1:
            raise ClusterError(
                f"{flag}={text}: {host} carries a port; give addresses only, ports come from --started_port"
            )
    refuse_repeated(hosts, f"{flag}={text}", "each node is listed once; processes per node are --nproc_per_node")
    return hosts


def is_number(text: str) -> bool:
    """Whether a text is a number with digits 0 to 9, short enough for a port, a rank or a device."""
    return text.isascii() and text.isdigit() and len(text) <= 9


def refuse_repeated(items: tuple[str, ...], given: str, rule: str) -> None:
    repeated = [item for item, count in Counter(items).items() if count > 1]
    if repeated:
        raise ClusterError(f"{given}: {', '.join(repeated)} is listed more than once; {rule}")
