"""The engine that started this process, and its variables; the innermost one if there are several."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fleet_train.cluster import horovod, kubernetes, mpi, network, slurm
from fleet_train.cluster.cluster import DEFAULT_JOIN_TIMEOUT_SECONDS, NO_HOST, is_number, may_be_host
from fleet_train.cluster.started import Started, Variables, endpoint
from fleet_train.errors import ClusterError, JoinTimeout

_SCONTROL_SECONDS = 20.0
"""How long ``scontrol show node`` may take: Slurm's controller answers at once, or is overloaded."""

ENGINE = "FLEET_TRAIN_ENGINE"
MASTER = "FLEET_TRAIN_MASTER"
STARTER = "FLEET_TRAIN_STARTER"  # who has set RANK and WORLD_SIZE, for messages
DEFAULT_PORT = 6170
OWN_ALIASES = ("127.0.0.1", "127.0.1.1")
"""Addresses to which Debian's /etc/hosts maps a machine's own name: other machines cannot use them."""
# Nothing is sent there: it only selects the route by which packets leave this machine.
_ANYWHERE = "192.0.2.1"


def read_torchrun(environ: Mapping[str, str]) -> Started | None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: of torchrun, PyTorchJob, Volcano's plugin, and hand-made scripts.

    Sources: pytorch.org "torchrun (Elastic Launch)", "Environment variables"; volcano-sh/volcano
    ``pkg/controllers/job/plugins/distributed-framework/pytorch``. Volcano and PyTorchJob count pods, torchrun ranks.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return None
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    of = Variables(environ, "torchrun" if by_torchrun else "RANK and WORLD_SIZE")
    port = of.port("MASTER_PORT")
    if port is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's own store listens at MASTER_PORT
    return of.started(
        "RANK",
        "WORLD_SIZE",
        by="" if by_torchrun else of.text(STARTER) or "whoever set RANK and WORLD_SIZE",
        local_index=of.number("LOCAL_RANK") or 0,
        local_count=of.number("LOCAL_WORLD_SIZE"),
        node=of.number("GROUP_RANK"),
        master=of.text("MASTER_ADDR"),
        port=port,
        job=f"torchrun-{of.text('TORCHELASTIC_RUN_ID') or of.text('MASTER_ADDR')}",
    )


Reader = Callable[[Mapping[str, str]], Started | None]
# The innermost first: an engine further down may have started one further up. That RANK and WORLD_SIZE come after
# MPI and Slurm is the one exception: scripts export them next to MASTER_ADDR, with the same numbers or old ones.
_READERS: tuple[tuple[str, Reader], ...] = (
    ("mpi", mpi.read_open_mpi),
    ("mpi", mpi.read_hydra),
    ("horovod", horovod.read),
    ("slurm", slurm.read),
    ("torchrun", read_torchrun),
    ("kubernetes", kubernetes.read_indexed_job),
    ("kubernetes", kubernetes.read_train_job),
    ("kubernetes", kubernetes.read_paddle_job),
    ("kubernetes", kubernetes.read_paddle_operator),
)
CHOICES = ("auto", "none", *dict.fromkeys(name for name, _ in _READERS))


def detect(environ: Mapping[str, str], asked: str | None = None) -> Started | None:
    """This process's place by its engine's variables; None if there is no engine.

    ``asked``: one of `CHOICES`; None: FLEET_TRAIN_ENGINE, else ``auto``. Raises ClusterError if variables
    contradict each other, or if the requested engine has set none.
    """
    choice = asked or environ.get(ENGINE, "").strip() or "auto"
    if choice not in CHOICES:
        raise ClusterError(f"{ENGINE}={choice} is not one of {', '.join(CHOICES)}")
    if choice == "none" or "FLEET_TRAIN_STORE" in environ:  # a rank of our launcher: the innermost of all
        return None
    if choice == "auto" and "TORCHELASTIC_RUN_ID" in environ:
        return read_torchrun(environ)  # its agent started this very process, whatever engine is outside
    first = next((each for name, read in _READERS if choice in ("auto", name) and (each := read(environ))), None)
    if first is None:
        if choice == "auto":
            return None
        raise ClusterError(
            f"--engine {choice} ({ENGINE}): none of its variables is set here, so this process was not started by it; "
            "leave the choice out"
        )
    by_hand = read_torchrun(environ) if choice == "auto" else None
    if by_hand is not None and (by_hand.index, by_hand.count) != (first.index, first.count):  # one of them is wrong
        raise ClusterError(
            f"RANK={by_hand.index} of WORLD_SIZE={by_hand.count}, but {first.engine} says that this is process "
            f"{first.index} of {first.count}; unset RANK and WORLD_SIZE, or choose one: {ENGINE}=torchrun, or the "
            "other's name (launch: --engine)"
        )
    return first


def alone_in_allocation(environ: Mapping[str, str]) -> str:
    """The message for a process that trains alone although Slurm allocated several nodes; "" otherwise."""
    nodes = 0 if "FLEET_TRAIN_STORE" in environ else slurm.allocated_nodes(environ)
    if nodes < 2:
        return ""
    return (
        f"this process trains alone: Slurm allocated {nodes} nodes to the job, but srun did not start this "
        "command; write srun before it to use them"
    )


# Not SLURM_NTASKS: of an allocation it is a bound, with which users ask for processors.
_COUNTS = """HOROVOD_SIZE OMPI_COMM_WORLD_SIZE MV2_COMM_WORLD_SIZE PMI_SIZE JSM_NAMESPACE_SIZE DMLC_NUM_WORKER
    SLURM_STEP_NUM_TASKS WORLD_SIZE LOCAL_WORLD_SIZE""".split()
_NUMBERS = """HOROVOD_RANK OMPI_COMM_WORLD_RANK MV2_COMM_WORLD_RANK PMI_RANK PALS_RANKID JSM_NAMESPACE_RANK
    SLURM_PROCID RANK LOCAL_RANK""".split()
# Of RANK alone it is not known whose it is.
_BESIDE_RANK = {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def alone_despite(environ: Mapping[str, str], launched: int | None = None) -> str:
    """The message for a process that trains alone, or for ``launched`` ranks on one node, whose environment says that
    there are more processes, or nodes; "" otherwise, and where ``FLEET_TRAIN_ENGINE=none`` was chosen."""
    if "FLEET_TRAIN_STORE" in environ or environ.get(ENGINE, "").strip() == "none":
        return ""
    ranks = launched or 1
    more = [name for name in _COUNTS if _number(environ, name) > ranks]
    more += [name for name in _NUMBERS if _number(environ, name) >= ranks]
    if not more or (more == ["RANK"] and not _BESIDE_RANK & environ.keys()):
        return alone_in_allocation(environ)
    alone = "this process trains alone" if ranks == 1 else f"this job has {ranks} ranks"
    start = "start the script with fleet_train launch"
    if launched:
        start = "give --nproc_per_node=N, or the machines (--cluster_node_ips, --hosts)"
    return (
        f"{alone}, although {more[0]}={environ[more[0]].strip()} says that there are more: no engine of "
        "docs/engines.md has set all of its variables here (torchrun's are RANK, WORLD_SIZE, MASTER_ADDR and "
        f"MASTER_PORT). If there are more, {start}; if not, {ENGINE}=none (launch: --engine none) says so"
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    return int(text) if is_number(text) else 0


@dataclass(frozen=True)
class MeetingPoint:
    """The place where the processes meet. ``hosts``: addresses of all nodes in the engine's order, if it lists them."""

    master: str
    port: int
    hosts: tuple[str, ...] = ()
    secret: str = ""
    """A secret shared by the processes, if the engine has a private channel for it."""
    is_alias: bool = False
    """Whether ``master`` is an address that a machine's own name has on that machine only (Debian's 127.0.1.1)."""


def locate(
    started: Started, environ: Mapping[str, str], timeout_seconds: float = DEFAULT_JOIN_TIMEOUT_SECONDS
) -> MeetingPoint:
    """Find out where process 0 listens. FLEET_TRAIN_MASTER=host[:port] overrides the engine.

    Raises ClusterError if it is unknown, or a name cannot be resolved; JoinTimeout if the engine exchanges it among all
    processes, and not all of them arrive within the time.
    """
    given = environ.get(MASTER, "").strip()
    if given:
        host, port = endpoint(given, MASTER)
        return _named(host, port or started.port or DEFAULT_PORT, started)
    if started.hosts:
        hosts = resolve_hosts(started.hosts, by_slurm=started.engine.startswith("Slurm"))
        return MeetingPoint(hosts[0], started.port or DEFAULT_PORT, hosts)
    if started.master:
        return _named(started.master, started.port or DEFAULT_PORT, started)
    place, _, secret = _told_by_engine(started, environ, timeout_seconds).partition("/")
    host, port = endpoint(place, started.engine)
    assert port is not None
    return MeetingPoint(host, port, secret=secret)


def _told_by_engine(started: Started, environ: Mapping[str, str], timeout_seconds: float) -> str:
    own = _own_endpoint(started, environ) if started.index == 0 else None
    try:
        if started.engine == horovod.ENGINE:
            return horovod.exchange(own, environ, timeout_seconds)
        if "PMI_FD" in environ or "PMI_PORT" in environ:
            return mpi.exchange_pmi(started, own, environ, timeout_seconds)
        return mpi.exchange_pmix(own, environ, timeout_seconds) or _where_mpirun_is(started, environ)
    except TimeoutError:
        raise JoinTimeout(
            f"not all {started.count} processes that {started.engine} started arrived within {timeout_seconds:g} s "
            f"to exchange their addresses, and it does not say which are missing; with {MASTER}=host:port for "
            "rank 0's node, they are named"
        ) from None


def _named(host: str, port: int, started: Started) -> MeetingPoint:
    address = network.resolve(host)
    alone = started.local_count == started.count
    return MeetingPoint(address, port, is_alias=host != address and address in OWN_ALIASES and not alone)


def resolve_hosts(hosts: Sequence[str], by_slurm: bool) -> tuple[str, ...]:
    """An address for each name. Slurm's names may be unknown to the resolver: then ``scontrol`` is asked."""
    for host in hosts:
        if not may_be_host(host):
            raise ClusterError(f"a node of this job is {host!r}, which {NO_HOST}")
    try:
        return tuple(_look_up(host) for host in hosts)
    except OSError as error:
        if not by_slurm:
            raise ClusterError(f"the names of the nodes cannot be resolved here: {error}") from None
    addresses = _addresses_of_slurm(hosts)
    return tuple(network.resolve(addresses.get(host, host)) for host in hosts)


def _look_up(host: str) -> str:
    return socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]  # type: ignore[return-value]


def _addresses_of_slurm(hosts: Sequence[str]) -> dict[str, str]:
    """Slurm's address of each node; empty without scontrol: the error is then the resolver's."""
    command = ["scontrol", "show", "node", ",".join(hosts), "--oneliner"]
    lines = network.output_of(command, _SCONTROL_SECONDS).splitlines()
    pairs = (re.search(r"NodeName=(\S+).*?NodeAddr=(\S+)", line) for line in lines)
    return {match[1]: match[2] for match in pairs if match is not None}


def _own_endpoint(started: Started, environ: Mapping[str, str]) -> str:
    """An address of this machine that the others may reach, a port that is free now, and a secret of this job."""
    host = "127.0.0.1" if started.local_count == started.count else _own_address(environ)
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}/{secrets.token_hex(16)}"


def _own_address(environ: Mapping[str, str]) -> str:
    """The address of this machine's name, else of the default route, else the first that is not loopback."""
    outside = [address for address in network.local_addresses() if not network.is_loopback(address)]
    names = (environ.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", ""), socket.gethostname())  # Hydra's name for this host
    for name in filter(None, names):
        try:
            address = socket.gethostbyname(name)
        except (OSError, UnicodeError):
            continue
        if address in outside:
            return address
    default = network.address_towards(_ANYWHERE)
    if default is not None and not network.is_loopback(default):
        return default
    return outside[0] if outside else "127.0.0.1"


def _where_mpirun_is(started: Started, environ: Mapping[str, str]) -> str:
    """The ``host:port`` of rank 0 without libpmix: Open MPI gives the node of mpirun, where it starts rank 0 by
    default."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.search(r"tcp://([0-9.,]+):", uri)
    for address in match[1].split(",") if match else ():
        if network.is_local(address, network.local_addresses()) or network.address_towards(address):
            return f"{address}:{started.port or DEFAULT_PORT}"
    raise ClusterError(
        "this process was started by mpirun, whose variables do not say where rank 0 is, and its library "
        "(libpmix.so.2) was not found; name rank 0's node: mpirun -x FLEET_TRAIN_MASTER=host:6170 ..."
    )
