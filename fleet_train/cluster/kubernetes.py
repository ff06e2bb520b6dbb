"""Kubernetes: the variables that operators and controllers give to a job's pods.

Hosts are names, of pods that have a service: a rescheduled pod keeps its name and gets a new address.
Sources: kubeflow/training-operator ``pkg/controller.v1/paddlepaddle/envvar.go`` (PaddleJob v1), PaddleFlow/
paddle-operator ``controllers/paddlejob_helper.go``, kubeflow/trainer ``pkg/runtime/framework/plugins/torch`` (TrainJob
v2), kubernetes.io "Indexed Job".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fleet_train.cluster.cluster import is_number, parse_hosts
from fleet_train.cluster.started import Started, Variables, checked, endpoint
from fleet_train.errors import ClusterError

MASTER, NNODES, NODE_RANK = "FLEET_TRAIN_MASTER", "FLEET_TRAIN_NNODES", "FLEET_TRAIN_NODE_RANK"


def read_paddle_job(environ: Mapping[str, str]) -> Started | None:
    """Kubeflow's PaddleJob v1: PADDLE_MASTER, PADDLE_NNODES, PADDLE_JOB_ID, and no rank.

    A worker's number is that of its pod's name, ``<job>-worker-<number>``; each has a service of that name.
    """
    if not {"PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_JOB_ID"} <= environ.keys():
        return None
    of = Variables(environ, "PaddleJob")
    count, job = of.needed("PADDLE_NNODES"), of.text("PADDLE_JOB_ID")
    _, port = endpoint(of.text("PADDLE_MASTER"), "PADDLE_MASTER")
    pod = of.text("POD_NAME", "HOSTNAME")
    match = re.fullmatch(re.escape(job) + r"-worker-(\d{1,6})", pod.partition(".")[0])
    if match is None:
        raise ClusterError(
            f"a PaddleJob's operator gives its pods no rank; it is read from the pod's name, {job}-worker-<number>, "
            f"and this one's is {pod or 'unknown'}. Use workers only (a Master is for parameter servers) and give "
            "the container POD_NAME from metadata.name (with hostNetwork the pod's host name is the machine's), or "
            "--engine none with --cluster_node_ips"
        )
    started = Started(f"PaddleJob {job}", int(match[1]), count, port=port, job=f"paddlejob-{job}")
    return _numbered(checked(started, "the number of the pod's name", "PADDLE_NNODES"), f"{job}-worker-")


def read_paddle_operator(environ: Mapping[str, str]) -> Started | None:
    """paddle-operator's pods, and PaddleCloud's: PADDLE_TRAINERS, POD_IP. For an elastic job, whose nodes are listed in
    etcd, the names of its pods (``intranet: Service``)."""
    if "PADDLE_ELASTIC_JOB_ID" in environ and "PADDLE_TRAINERS" not in environ:
        return _elastic(environ)
    if not {"PADDLE_TRAINERS", "POD_IP", "PADDLE_PORT"} <= environ.keys():
        return None
    pod = read_paddlecloud(environ)
    started = Started(
        engine="paddle-operator",
        index=pod.hosts.index(pod.node_host),
        count=len(pod.hosts),
        hosts=pod.hosts,
        master=pod.hosts[0],
        port=pod.started_port,
        job=Variables(environ, "paddle-operator").text("PADDLE_JOB_ID") or "paddle-operator",
    )
    return checked(started, "POD_IP", "PADDLE_TRAINERS")


def _elastic(environ: Mapping[str, str]) -> Started:
    of = Variables(environ, "paddle-operator (elastic)")
    pod = of.text("POD_IP")
    match = re.fullmatch(r"(.+-worker-)(\d{1,6})", pod)
    if match is None:
        raise ClusterError(
            "an elastic job of paddle-operator keeps its nodes in etcd, which is not queried; with intranet: Service "
            "in its spec POD_IP is the pod's name, <job>-worker-<number>, and the others' follow from it"
        )
    count, port, job = of.needed("PADDLE_ELASTIC_NP"), of.port("PADDLE_PORT"), of.text("PADDLE_ELASTIC_JOB_ID")
    started = Started("paddle-operator (elastic)", int(match[2]), count, port=port, job=job)
    return _numbered(checked(started, "the number of POD_IP", "PADDLE_ELASTIC_NP"), match[1])


def read_train_job(environ: Mapping[str, str]) -> Started | None:
    """TrainJob v2 with its torch runtime: PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR ``<job>-node-0-0.<job>``."""
    if not {"PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"} <= environ.keys():
        return None
    of = Variables(environ, "TrainJob")
    master = of.text("PET_MASTER_ADDR")
    started = of.started(
        "PET_NODE_RANK",
        "PET_NNODES",
        by=f"TrainJob {master.partition('.')[2].partition('.')[0] or master}",
        master=master,
        port=of.port("PET_MASTER_PORT"),
        job=f"trainjob-{master}",
        processes=None if of.text("PET_NPROC_PER_NODE") in ("auto", "cpu", "gpu") else of.number("PET_NPROC_PER_NODE"),
    )
    return _with_names(started)


def read_indexed_job(environ: Mapping[str, str]) -> Started | None:
    """A Job with ``completionMode: Indexed`` and a headless service, or anything else that gives the first node, the
    number of nodes, and this one's: FLEET_TRAIN_MASTER, FLEET_TRAIN_NNODES, FLEET_TRAIN_NODE_RANK or
    JOB_COMPLETION_INDEX. A Job's index alone is not enough: its pods may be unrelated."""
    if not {MASTER, NNODES} <= environ.keys():
        return None
    of = Variables(environ, f"{MASTER} and {NNODES}")
    master, port = endpoint(of.text(MASTER), MASTER)
    in_job = NODE_RANK not in environ and "JOB_COMPLETION_INDEX" in environ
    started = of.started(
        f"{NODE_RANK}|JOB_COMPLETION_INDEX",
        NNODES,
        by="a Kubernetes Job" if in_job else MASTER,
        master=master,
        port=port,
        job=f"job-{master}",
    )
    return _with_names(started)


def _with_names(started: Started) -> Started:
    """``train-0.train`` is pod 0 of a set with ``train-1.train``, ...: of an indexed Job or a StatefulSet."""
    first, dot, domain = started.master.partition(".")
    match = re.fullmatch(r"(.*[a-z].*-)0", first)
    return started if match is None else _numbered(started, match[1], dot + domain)


def _numbered(started: Started, prefix: str, suffix: str = "") -> Started:
    """Complete a pod's description with the names of all pods, which differ in their numbers."""
    hosts = tuple(f"{prefix}{number}{suffix}" for number in range(started.count))
    return replace(started, hosts=hosts, master=hosts[0])


# Reads the variables that PaddleCloud and the PaddleJob operator give to every pod: for the launcher and for ranks.


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
        """Combine variables and flags: (hosts, this node, first port). Raises ClusterError if a flag contradicts."""
        _agree("--cluster_node_ips", hosts, "PADDLE_TRAINERS", self.hosts)
        _agree("--node_ip", node_host, "POD_IP", self.node_host)
        return self.hosts, self.node_host, self.started_port if started_port is None else started_port


def _agree(flag: str, given: object, variable: str, value: object) -> None:
    if given is not None and given != value:
        raise ClusterError(f"{flag} contradicts the variable {variable}; with --use_paddlecloud leave {flag} out")


def read_paddlecloud(environ: Mapping[str, str]) -> CloudNode:
    """Read PaddleCloud's nodes, this node and the first port, and cross-check them.

    Raises ClusterError naming the variable that is missing or contradicts another one; values of other variables are
    never part of the message.
    """
    hosts = parse_hosts(_required(environ, "PADDLE_TRAINERS"), "PADDLE_TRAINERS")
    node_host = _required(environ, "POD_IP")
    if node_host not in hosts:
        raise ClusterError(
            f"POD_IP={node_host} is not in PADDLE_TRAINERS={','.join(hosts)}; both describe this job's pods"
        )
    number = _number(environ, "PADDLE_TRAINER_ID")
    if number is not None and number != hosts.index(node_host):
        raise ClusterError(
            f"PADDLE_TRAINER_ID={number} contradicts POD_IP={node_host}, which is number {hosts.index(node_host)} in "
            "PADDLE_TRAINERS (on PaddleCloud it numbers the pods from 0, not the processes)"
        )
    started_port = _number(environ, "PADDLE_PORT")
    ports = _number(environ, "TRAINER_PORTS_NUM")
    if ports == 0:
        raise ClusterError("TRAINER_PORTS_NUM=0: a pod needs at least one port")
    _check_endpoints(environ, hosts, started_port, ports)
    return CloudNode(hosts, node_host, started_port, ports)


def read_as_rank(environ: Mapping[str, str]) -> CloudNode:
    """Read PaddleCloud's variables in a rank that another launcher started, which has overwritten two of them."""
    theirs = ("PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS")
    return read_paddlecloud({name: value for name, value in environ.items() if name not in theirs})


def _check_endpoints(
    environ: Mapping[str, str], hosts: tuple[str, ...], started_port: int | None, ports: int | None
) -> None:
    """Check PADDLE_TRAINER_ENDPOINTS: redundant, it may repeat the pods, with one or with all ports, nothing else."""
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
