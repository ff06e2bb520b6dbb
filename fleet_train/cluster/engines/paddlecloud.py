"""Reads the variables that PaddleCloud and the PaddleJob operator give to every pod: for the launcher and for ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet_train.cluster.hosts import is_number, parse_hosts
from fleet_train.errors import ClusterError


@dataclass(frozen=True)
class CloudNode:
    """The values of the pod's variables. ``ports_per_node`` is None if there is none."""

    hosts: tuple[str, ...]
    node_host: str
    started_port: int | None
    ports_per_node: int | None

    def merged(
        self, hosts: tuple[str, ...] | None, node_host: str | None, started_port: int | None
    ) -> tuple[tuple[str, ...], str, int | None]:
        """(hosts, this node, first port) combined with the flags. Raises ClusterError if a flag contradicts."""
        _agree("--cluster_node_ips", hosts, "PADDLE_TRAINERS", self.hosts)
        _agree("--node_ip", node_host, "POD_IP", self.node_host)
        return self.hosts, self.node_host, self.started_port if started_port is None else started_port


def _agree(flag: str, given: object, variable: str, told: object) -> None:
    if given is not None and given != told:
        raise ClusterError(f"{flag} contradicts the variable {variable}; with --use_paddlecloud leave {flag} out")


def read_paddlecloud(environ: Mapping[str, str]) -> CloudNode:
    """Nodes, this node and the first port, cross-checked.

    Raises ClusterError naming the variable that is missing or contradicts another one; values of other variables are
    never part of the message.
    """
    hosts = parse_hosts(_required(environ, "PADDLE_TRAINERS"), "PADDLE_TRAINERS")
    node_host = _required(environ, "POD_IP")
    if node_host not in hosts:
        raise ClusterError(
            f"POD_IP={node_host} is not in PADDLE_TRAINERS={','.join(hosts)}; both describe this job's pods"
        )
    _check_node_number(environ, hosts, node_host)
    started_port = _number(environ, "PADDLE_PORT")
    ports = _number(environ, "TRAINER_PORTS_NUM")
    if ports == 0:
        raise ClusterError("TRAINER_PORTS_NUM=0: a pod needs at least one port")
    _check_endpoints(environ, hosts, started_port, ports)
    return CloudNode(hosts, node_host, started_port, ports)


def read_as_rank(environ: Mapping[str, str]) -> CloudNode:
    """The same, in a rank that another launcher started, which has overwritten two of the variables."""
    theirs = ("PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS")
    return read_paddlecloud({name: value for name, value in environ.items() if name not in theirs})


def _check_node_number(environ: Mapping[str, str], hosts: tuple[str, ...], node_host: str) -> None:
    number = _number(environ, "PADDLE_TRAINER_ID")
    if number is not None and number != hosts.index(node_host):
        raise ClusterError(
            f"PADDLE_TRAINER_ID={number} contradicts POD_IP={node_host}, which is number {hosts.index(node_host)} in "
            "PADDLE_TRAINERS (on PaddleCloud it numbers the pods from 0, not the processes)"
        )


def _check_endpoints(
    environ: Mapping[str, str], hosts: tuple[str, ...], started_port: int | None, ports: int | None
) -> None:
    """PADDLE_TRAINER_ENDPOINTS is redundant: it may repeat the pods, with one or with all ports, nothing else."""
    text = environ.get("PADDLE_TRAINER_ENDPOINTS", "").strip()
    if not text:
        return
    pairs = [endpoint.strip().rpartition(":") for endpoint in text.split(",")]
    if any(not host or not is_number(port) for host, _, port in pairs):
        raise ClusterError("PADDLE_TRAINER_ENDPOINTS is not a comma list of host:port")
    if tuple(dict.fromkeys(host for host, _, _ in pairs)) != hosts:
        raise ClusterError("PADDLE_TRAINER_ENDPOINTS names other hosts, or in another order, than PADDLE_TRAINERS")
    if ports is not None and len(pairs) not in (len(hosts), len(hosts) * ports):
        raise ClusterError(
            f"PADDLE_TRAINER_ENDPOINTS has {len(pairs)} entries; {len(hosts)} pods with TRAINER_PORTS_NUM={ports} make "
            f"{len(hosts)} or {len(hosts) * ports}"
        )
    first_port = int(pairs[0][2])
    if started_port is not None and first_port != started_port:
        raise ClusterError(f"PADDLE_TRAINER_ENDPOINTS starts at port {first_port}, but PADDLE_PORT={started_port}")


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise ClusterError(
            f"--use_paddlecloud: the variable {name} is not set; PaddleCloud and PaddleJob set it in every pod, "
            "elsewhere use --cluster_node_ips and --node_ip"
        )
    return value


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not is_number(text):
        raise ClusterError(f"{name}={text} is not a whole number")
    return int(text)
