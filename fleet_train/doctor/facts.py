"""Measured facts: plain dataclasses that are sent as JSON. Sizes in bytes, times in seconds; -1 = no limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
UNLIMITED = -1
_readers: dict[type[Any], Any] = {}


@dataclass(frozen=True)
class Software:
    python: str
    paddle: str
    fleet_train: str
    numpy: str
    package_digest: str
    profile: str = ""
    """Digest of --strategy; empty: none was given."""
    script: str = ""
    """Digest of --script."""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Memory:
    total: int
    available: int
    """Available to this process: the smaller of the machine's and what its control groups leave."""
    limit: int = UNLIMITED
    oom_kills: int = 0
    """Processes that the OOM killer has ended in this control group."""
    shm_total: int = 0
    shm_free: int = 0


@dataclass(frozen=True)
class Processors:
    name: str
    usable: int
    quota: float = float(UNLIMITED)
    """The number of processors that the control groups' quota allows."""
    gflops: float = 0.0
    """Of one processor: the best of many products of two small matrices. 0: not measured."""
    share: float = 1.0
    """The share of one processor that a busy thread got during the measurement."""


@dataclass(frozen=True)
class Limits:
    open_files: int
    locked_memory: int
    has_infiniband: bool = False


@dataclass(frozen=True)
class Folder:
    """The log or output folder, or its nearest existing parent."""

    purpose: str
    path: str
    free: int = 0
    free_files: int = UNLIMITED
    bytes_per_second: float = 0.0
    error: str = ""
    shared_with: tuple[int, ...] = ()
    """Other nodes that see the same folder."""


@dataclass(frozen=True)
class Route:
    """To another node: interface and source address; empty: no route."""

    interface: str
    source: str


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    mtu: int
    megabits: int = 0
    """The speed that a real network card negotiated with the switch; 0: unknown."""


@dataclass(frozen=True)
class Network:
    host_name: str
    resolved: str
    """The address of this machine's own host name here; empty: none."""
    is_named: bool
    """Whether the node list contains this machine by a name that resolves to 127.* here."""
    interfaces: tuple[Interface, ...]
    routes: dict[int, Route]
    held: dict[int, str]
    """Ports of the job that cannot be opened, and the processes that use them."""
    proxies: tuple[str, ...] = ()
    """Names of proxy variables that are set and do not exclude all nodes."""
    wrong_interface_variables: tuple[str, ...] = ()
    """GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, if it names no interface of this machine."""
    outgoing_ports: tuple[int, int] = (32768, 60999)


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    driver: str
    ecc_errors: int = 0
    """Uncorrected since the driver was loaded."""
    memory_used: int = 0
    links_down: int = 0
    """NVLinks that are inactive, if others of the GPU are active."""


@dataclass(frozen=True)
class Gpus:
    found: tuple[Gpu, ...] = ()
    nccl: str = ""
    error: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """One machine; None: not requested."""

    index: int
    processes: int
    software: Software | None = None
    memory: Memory | None = None
    processors: Processors | None = None
    limits: Limits | None = None
    folders: tuple[Folder, ...] = ()
    network: Network | None = None
    gpus: Gpus | None = None


@dataclass(frozen=True)
class PortTry:
    """A connection to one port of a node: ``open``, ``refused``, ``timed out``, ``no route``, ``another program``."""

    target: int
    port: int
    outcome: str
    seen_as: str = ""
    """The address that the target saw, if it is not this node's."""


@dataclass(frozen=True)
class Echo:
    """Round trips of small messages to a node. ``ahead``: this node's clock offset, exact to ``uncertainty``."""

    target: int
    median: float
    ahead: float
    uncertainty: float


@dataclass(frozen=True)
class Datagrams:
    """Packets with Don't Fragment set. ``largest``: the largest one that was answered; 0: none was.

    ``known``: the path's MTU according to the kernel afterwards; below the interface's, a router has reported it.
    """

    target: int
    largest: int
    known: int
    tried: int


@dataclass(frozen=True)
class Stream:
    """Bytes from one node to another over one connection. ``alone``: no other transfer of ours ran on the two nodes."""

    source: int
    target: int
    bytes_per_second: float
    best: float = 0.0
    """The best 50 ms: the capacity of the path when both processors are free."""
    segments: int = 0
    retransmits: int = 0
    error: str = ""
    alone: bool = True


@dataclass(frozen=True)
class NodeReport:
    """Everything that one node knows. ``present``: the connected nodes, itself included."""

    facts: NodeFacts
    present: tuple[int, ...]
    tries: tuple[PortTry, ...] = ()
    echoes: tuple[Echo, ...] = ()
    datagrams: tuple[Datagrams, ...] = ()
    streams: tuple[Stream, ...] = ()


@dataclass(frozen=True)
class GroupResult:
    """How this node's process of the group ended; ``skipped``: why there was none."""

    ok: bool
    words: str
    seconds: float = 0.0
    skipped: str = ""


@dataclass(frozen=True)
class Examination:
    """The complete result, the same on every node. ``addresses``: of all nodes of the list."""

    addresses: tuple[str, ...]
    reports: dict[int, NodeReport]
    groups: dict[int, GroupResult] = field(default_factory=dict)
    started_port: int = 6170

    def host(self, index: int) -> str:
        return f"node {index} ({self.addresses[index]})" if len(self.addresses) > 1 else "this machine"


def to_json(value: Any) -> dict[str, Any]:
    return asdict(value)


def from_json(kind: type[T], data: Any) -> T:
    """Raises ValueError for anything but a ``kind``: it may come from another machine."""
    found: T = _reader(kind).validate_python(data)
    return found


def _reader(kind: type[Any]) -> Any:
    """Created once per kind: that takes longer than parsing."""
    from pydantic import TypeAdapter  # heavy: not for --help

    if kind not in _readers:
        _readers[kind] = TypeAdapter(kind)
    return _readers[kind]
