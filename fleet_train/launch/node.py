"""One node of a job, from the request and this machine; and the environment of its ranks.

`place` combines the request with what this machine has (`look_around`: addresses, processors, Paddle's build and its
devices) into a checked `Node`. `build_environment` is what its ranks get: without leftovers of other jobs, and without
overriding the user's values. Nothing here imports Paddle.
"""

from __future__ import annotations

import json
import platform
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from fleet_train import __version__, timeouts
from fleet_train.cluster import network
from fleet_train.cluster.at_import import ADVICE, advice_for_rank, advise, advised, is_amd_processor, usable_processors
from fleet_train.cluster.cluster import Cluster, assign, is_number, refuse_repeated
from fleet_train.cluster.environment import CHECKS, SETTINGS, TRACE, is_strict, rank_variables
from fleet_train.cluster.installed import container, installed_paddle
from fleet_train.cluster.network import interface_variables, is_local
from fleet_train.cluster.store.access import JOB_ID, SECRET_FILE
from fleet_train.errors import ClusterError, ProfileError
from fleet_train.launch.request import DEFAULT_HOST, LaunchRequest

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
    counts: tuple[int, ...] = ()
    """The number of processes of each node, if they are unlike. Empty: ``processes``, this node's, on each."""

    @property
    def address(self) -> str:
        return self.addresses[self.index]

    def host(self, index: int) -> str:
        """Its permanent identity: name or address."""
        return self.hosts[index] if self.hosts else self.addresses[index]

    @property
    def every_host(self) -> tuple[str, ...]:
        return self.hosts or self.addresses

    @property
    def is_leader(self) -> bool:
        return self.index == self.leader

    @property
    def world_size(self) -> int:
        return sum(self.every_count)

    @property
    def every_count(self) -> tuple[int, ...]:
        return self.counts or (self.processes,) * len(self.addresses)

    @property
    def processes_in_words(self) -> int | str:
        """``2``; ``1 + 2 + 1`` if they are unlike."""
        return " + ".join(map(str, self.counts)) if self.counts else self.processes

    @property
    def store_port(self) -> int:
        return self.started_port + self.processes

    @property
    def store_endpoint(self) -> str:
        """Where the leader's store listens; by name if the node has one, so that it is found at a new address."""
        return self.store_of(self.leader)

    def store_of(self, index: int) -> str:
        return f"{self.host(index)}:{self.store_port_of(index)}"

    def store_port_of(self, index: int) -> int:
        return self.started_port + (self.counts[index] if self.counts else self.processes)

    @property
    def ranks(self) -> range:
        """The ranks that run on this node, in the order of their local index."""
        return self.ranks_of(self.index)

    def ranks_of(self, index: int) -> range:
        first = sum(self.counts[:index]) if self.counts else index * self.processes
        return range(first, first + self.every_count[index])

    def node_of(self, rank: int) -> int:
        """The node on which a rank runs; of a rank outside the job, a number outside of the nodes."""
        return bisect_right(list(accumulate(self.every_count)), rank)

    def cluster(self, rank: int) -> Cluster:
        """The job, as one of its ranks sees it."""
        return Cluster(assign(self.addresses, self.every_count, self.started_port), rank)

    def endpoint_of(self, rank: int) -> str:
        """Its address and port; unlike the store's, nothing of ours listens there."""
        index = self.node_of(rank)
        return f"{self.addresses[index]}:{self.started_port + self.ranks_of(index).index(rank)}"

    def among(self, nodes: tuple[int, ...]) -> Node:
        """This node in a job of these nodes only (positions in ``addresses``), which must contain it
        and the leader."""
        addresses = tuple(self.addresses[i] for i in nodes)
        hosts = tuple(self.hosts[i] for i in nodes) if self.hosts else ()
        counts = tuple(self.counts[i] for i in nodes) if self.counts else ()
        index, leader = nodes.index(self.index), nodes.index(self.leader)
        return replace(self, addresses=addresses, hosts=hosts, index=index, leader=leader, numbers=nodes, counts=counts)

    def describe(self, index: int | None = None) -> str:
        index = self.index if index is None else index
        return f"node {self.numbers[index] if self.numbers else index} ({self.addresses[index]})"


def place(request: LaunchRequest, machine: Machine) -> Node:
    """The node that the request describes on this machine. Raises ClusterError; resolves host names only."""
    hosts = request.hosts or (DEFAULT_HOST,)
    addresses = tuple(network.resolve(host) for host in hosts)
    check_addresses(hosts, addresses)
    index = choose_node(hosts, addresses, request.node_host, machine.addresses, machine.container)
    counts = choose_counts(request, index, machine.gpus)
    asked = counts[index] if counts else request.processes_per_node
    given = f"--cluster_node_ips gives {hosts[index]}:{asked}" if counts else ""
    processes, devices = choose_processes(request.selected_gpus, asked, machine.gpus, given)
    check_port_range(request.first_port, processes)
    if request.ports_per_node is not None and processes > request.ports_per_node:
        raise ClusterError(
            f"TRAINER_PORTS_NUM={request.ports_per_node} is too few for {processes} processes per node, each of which "
            "needs a port; request more ports or start fewer processes"
        )
    interface = choose_interface(addresses, index, machine, network.interface_towards)
    names = hosts if request.by_name else ()
    counts = counts if len(set(counts)) > 1 else ()
    return Node(addresses, index, request.first_port, processes, devices, interface, hosts=names, counts=counts)


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


def choose_node(
    hosts: tuple[str, ...], addresses: tuple[str, ...], asked: str | None, local: tuple[str, ...], container: str = ""
) -> int:
    """Which of the listed nodes this machine is. Raises ClusterError with its addresses. ``container``: its kind, if
    this process runs in one."""
    bridged = (
        f"this is a container ({container}), which has its machine's addresses only in the machine's network: start it "
        "with docker run --network=host (a pod with hostNetwork: true)"
        if container
        else ""
    )
    mine = f"this machine has {', '.join(local) or 'no IPv4 address'}"
    if asked is None:
        matching = [i for i, address in enumerate(addresses) if network.is_local(address, local)]
        if len(matching) == 1:
            return matching[0]
        matches = "none" if not matching else ", ".join(addresses[i] for i in matching)
        fix = bridged if bridged and not matching else "add --node_ip=<this machine's address>"
        raise ClusterError(
            f"cannot tell which of the nodes {','.join(hosts)} this machine is: {matches} of them "
            f"{'is' if not matching else 'are'} its own ({mine}); {fix}"
        )
    address = asked if asked in addresses else network.resolve(asked)
    if address not in addresses:
        raise ClusterError(
            f"--node_ip={asked} is not among --cluster_node_ips={','.join(hosts)}; every node is started with the same "
            f"list and with its own address from it ({mine}){bridged and '; ' + bridged}"
        )
    if not network.is_local(address, local):
        raise ClusterError(
            f"--node_ip={asked} is not an address of this machine: {mine}; "
            f"{bridged or '--node_ip must differ on every machine'}"
        )
    return addresses.index(address)


def choose_counts(request: LaunchRequest, index: int, gpus: tuple[str, ...] | None) -> tuple[int, ...]:
    """The number of processes of each node, if the node list gives that of any; ``index``: this node. A node without
    a number has --nproc_per_node, or 1: every machine must read the same numbers. Raises ClusterError."""
    if not request.counts:
        return ()
    asked, own = request.processes_per_node, request.counts[index]
    node = (request.hosts or (DEFAULT_HOST,))[index]
    if asked is not None and own not in (None, asked) and None not in request.counts:
        raise ClusterError(
            f"--nproc_per_node={asked}, but --cluster_node_ips gives {node}:{own}; leave --nproc_per_node out: it "
            "is for the nodes without a number in the list"
        )
    if own is None and asked is None and request.selected_gpus is None and gpus and len(gpus) > 1:
        raise ClusterError(
            f"--cluster_node_ips gives numbers of processes, but none to {node}, which has {len(gpus)} visible GPUs; "
            f"write {node}:{len(gpus)}, or fewer, in the list on every machine"
        )
    return tuple(asked or 1 if count is None else count for count in request.counts)


def choose_processes(
    selected: tuple[str, ...] | None, asked: int | None, gpus: tuple[str, ...] | None, given: str = ""
) -> tuple[int, tuple[str, ...] | None]:
    """(processes, devices). Without GPUs in the build, ``--selected_gpus=0,1`` gives the number of processes.

    ``given``: what asks for that many, for messages."""
    given = given or f"--nproc_per_node={asked}"
    if asked is not None and asked < 1:
        raise ClusterError(f"--nproc_per_node={asked} is too few; a node runs at least 1 process")
    if selected and asked and len(selected) != asked:
        raise ClusterError(
            f"--selected_gpus={','.join(selected)} names {len(selected)} devices, but {given}; there is one process "
            "per device, so give one of the two, or numbers that agree"
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
        wanted = f"--selected_gpus={','.join(devices)}" if missing else given
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


@dataclass(frozen=True)
class Machine:
    """Facts that decide how a job is started here. ``gpus`` is None for a build of Paddle without GPU code."""

    interfaces: dict[str, tuple[str, ...]]
    processors: int
    is_amd: bool
    gpus: tuple[str, ...] | None
    versions: dict[str, str]
    container: str = ""
    """The kind of container that this process runs in, as far as it can be seen."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for group in self.interfaces.values() for address in group)


def look_around(environ: Mapping[str, str]) -> Machine:
    distribution, paddle_version = installed_paddle()
    return Machine(
        interfaces=network.interface_addresses(),
        processors=usable_processors(),
        is_amd=is_amd_processor(),
        gpus=visible_gpus(environ) if distribution == "paddlepaddle-gpu" else None,
        versions={
            "python": platform.python_version(),
            "fleet_train": __version__,
            "paddle": f"{paddle_version} ({distribution})" if distribution else "not installed",
        },
        container=container(environ),
    )


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that processes may use, by number: CUDA_VISIBLE_DEVICES, else /dev, else (WSL) nvidia-smi."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen != "all":
        return tuple(part.strip() for part in chosen.split(",") if part.strip())
    numbers = [entry.name.removeprefix("nvidia") for entry in devices.glob("nvidia[0-9]*")]
    return tuple(sorted((n for n in numbers if is_number(n)), key=int)) or _gpus_of_nvidia_smi()


def _gpus_of_nvidia_smi() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    lines = network.output_of(command, timeouts.TOOL_SECONDS).splitlines()
    return tuple(line.strip() for line in lines if is_number(line.strip()))


# Variables of an outer job (ours, PaddleCloud's, an older launcher's), and those that override flags of Paddle's own
# launcher: the inner job is a different one.
_OTHER_JOBS = """
POD_IP PADDLE_MASTER PADDLE_DEVICES PADDLE_NNODES PADDLE_RUN_MODE PADDLE_LOG_LEVEL PADDLE_LOG_OVERWRITE PADDLE_SORT_IP
PADDLE_NPROC_PER_NODE PADDLE_JOB_ID PADDLE_RANK PADDLE_LOG_DIR PADDLE_MAX_RESTART PADDLE_ELASTIC_LEVEL
PADDLE_ELASTIC_TIMEOUT PADDLE_SERVER_NUM PADDLE_TRAINER_NUM PADDLE_SERVERS_ENDPOINTS PADDLE_TRAINERS_ENDPOINTS
PADDLE_GLOO_PORT PADDLE_WITH_GLOO PADDLE_START_PORT PADDLE_IPS PADDLE_AUTO_PARALLEL_CONFIG PADDLE_AUTO_CLUSTER
PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT PADDLE_GLOBAL_SIZE
PADDLE_LOCAL_SIZE PADDLE_GLOBAL_RANK PADDLE_LOCAL_RANK PADDLE_RANK_IN_NODE PADDLE_DISTRI_BACKEND PADDLE_XCCL_BACKEND
PADDLE_BACKUP_ENV_PATH PADDLE_TRAINERS PADDLE_PORT PADDLE_PSERVERS_IP_PORT_LIST PADDLE_TRAINING_ROLE
DISTRIBUTED_TRAINER_ENDPOINTS COLLECTIVE_MASTER_IP TRAINER_PORTS_NUM TRAINER_IP_PORT_LIST
FLAGS_selected_gpus FLAGS_selected_cpus FLAGS_selected_xpus FLAGS_START_PORT FLAGS_FIXED_PORT
RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE
PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT
FLEET_TRAIN_MASTER FLEET_TRAIN_NNODES FLEET_TRAIN_NODE_RANK FLEET_TRAIN_ENGINE FLEET_TRAIN_STARTER
FLEET_TRAIN_STORE FLEET_TRAIN_STRATEGY FLEET_TRAIN_SET FLEET_TRAIN_JOIN_TIMEOUT FLEET_TRAIN_ATTEMPT FLEET_TRAIN_LAUNCHED
FLEET_TRAIN_ADVICE FLEET_TRAIN_REPORT_TO
"""
SCRUBBED = frozenset(_OTHER_JOBS.split())


@dataclass(frozen=True)
class LaunchEnvironment:
    """``ours``: variables that we set. ``removed``: those we removed. ``kept``: names whose user value was kept."""

    ours: dict[str, str]
    removed: frozenset[str]
    kept: tuple[str, ...]
    import_path: Path | None = None
    hidden: frozenset[str] = frozenset()
    """Names that the profile's environment section sets: their values may be secrets."""

    def over(self, environ: Mapping[str, str]) -> dict[str, str]:
        merged = {name: value for name, value in environ.items() if name not in self.removed} | self.ours
        if self.import_path is not None:
            merged["PYTHONPATH"] = appended(merged.get("PYTHONPATH", ""), str(self.import_path))
        return merged

    def shown(self) -> dict[str, str]:
        """What we set, without any value of the user's: PYTHONPATH is extended, the profile's values are ``(set)``."""
        added = {"PYTHONPATH": f"...:{self.import_path}"} if self.import_path is not None else {}
        ours = {name: value for name, value in self.ours.items() if name != ADVICE}
        return ours | dict.fromkeys(self.hidden & ours.keys(), "(set)") | added


def build_environment(
    node: Node,
    machine: Machine,
    environ: Mapping[str, str],
    request: LaunchRequest,
    *,
    profile: Mapping[str, str],
    strategy: str | None = None,
    import_path: Path | None = None,
    job_id: str = "",
    hidden: frozenset[str] = frozenset(),
) -> LaunchEnvironment:
    """What to set and what to remove. The user's own variables override the profile's and our advice.

    ``profile``: the variables of its environment section, whose names are ``hidden``, and of its knobs. ``strategy``:
    its name or absolute path. ``import_path``: the package's folder if it is not installed.
    """
    refuse_ours(profile)
    of_others = (SCRUBBED & environ.keys()) | advised(environ)
    users = {name: value for name, value in environ.items() if name not in of_others}
    kept = tuple(name for name, value in profile.items() if name in users and users[name] != str(value))
    advice = {name: value for name, value in _advice(node, machine).items() if name not in users.keys() | profile}
    ours: dict[str, str] = {}
    # The script may use another profile, as the function that spawn calls does: then this one's variables give way.
    advise(ours, advice | {name: str(value) for name, value in profile.items() if name not in users})
    ours |= {"FLEET_TRAIN_STORE": node.store_endpoint, "FLEET_TRAIN_JOIN_TIMEOUT": f"{request.join_timeout_seconds:g}"}
    if request.strict or is_strict(environ):
        ours["FLEET_TRAIN_STRICT"] = "1"
    if request.verify_joint_batch:
        ours[CHECKS] = str(request.verify_joint_batch)
    if request.trace:
        ours[TRACE] = request.trace
    if job_id:
        ours[JOB_ID] = job_id
    if request.secret_file is not None:
        ours[SECRET_FILE] = str(request.secret_file)
    if request.settings:
        ours[SETTINGS] = json.dumps(request.settings)
    if strategy:
        ours["FLEET_TRAIN_STRATEGY"] = strategy
    return LaunchEnvironment(ours, of_others, kept, import_path, hidden)


def refuse_ours(profile: Mapping[str, str]) -> None:
    """Raise ProfileError for a profile's variable that each rank gets from what starts it."""
    refused = sorted(SCRUBBED & profile.keys())
    if refused:
        raise ProfileError(
            f"environment: {refused[0]} is set by the launcher for every rank; remove it from the profile"
        )


def _advice(node: Node, machine: Machine) -> dict[str, str]:
    # Nodes that are emulated on this machine share its processors.
    here = zip(node.addresses, node.every_count, strict=True)
    processes = sum(count for address, count in here if is_local(address, machine.addresses))
    threads = max(1, machine.processors // max(node.processes, processes))
    advice = advice_for_rank(threads, node.devices is None, machine.is_amd)
    if node.interface is not None:
        advice |= interface_variables(node.interface)
    return advice


def appended(path: str, folder: str) -> str:
    """A search path with a folder appended, unless it contains it already."""
    parts = [part for part in path.split(":") if part]
    return ":".join(parts if folder in parts else [*parts, folder])


OF_ONE_ATTEMPT = frozenset(
    "FLEET_TRAIN_STORE FLEET_TRAIN_ATTEMPT FLEET_TRAIN_LAUNCHED PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM "
    "PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT PADDLE_MASTER PADDLE_NNODES PADDLE_GLOBAL_SIZE PADDLE_LOCAL_SIZE "
    "PADDLE_GLOBAL_RANK PADDLE_LOG_DIR FLEET_TRAIN_TRAINED".split()
)
"""The variables of a rank that another attempt may have differently: nothing reads them before the script does."""


def variables_of_rank(cluster: Cluster, selected_gpu: int | None) -> dict[str, str]:
    """What ``paddle.distributed.launch`` sets for one rank. ``selected_gpu``: by position among the visible ones; None:
    it computes on processors."""
    rank = cluster.this
    variables = rank_variables(cluster) | {
        "PADDLE_MASTER": cluster.endpoints[0],
        "PADDLE_NNODES": str(cluster.node_num),
        "PADDLE_GLOBAL_SIZE": str(cluster.world_size),
        "PADDLE_LOCAL_SIZE": str(len(cluster.ranks_on_node(rank.node_index))),
        "PADDLE_GLOBAL_RANK": str(rank.index),
        "PADDLE_LOCAL_RANK": str(rank.local_index),
        "PADDLE_AUTO_CLUSTER": "0",
    }
    gpu = {"PADDLE_DISTRI_BACKEND": "gloo"} if selected_gpu is None else {"FLAGS_selected_gpus": str(selected_gpu)}
    return variables | gpu
