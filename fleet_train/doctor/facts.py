"""Measured facts: plain dataclasses that are sent as JSON. Sizes in bytes, times in seconds; -1 = no limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet_train import timeouts
from fleet_train.errors import JoinTimeout
from fleet_train.selftest.options import chosen_groups

_DOCTOR_WHOLE_SECONDS = 56.0
"""How long the doctor takes from its start to the verdict, with the default ``--join_timeout``; the remaining time
bounds each part."""

UNLIMITED = -1
PASS, WARN, FAIL = "PASS", "WARN", "FAIL"


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
    """Speed of one processor in 1e9 operations a second: the best of many small matrix products; 0: unknown."""
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
    """The route to another node: interface and source address; empty: no route."""

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
class NetworkFacts:
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
    """Uncorrected ECC errors since the driver was loaded."""
    memory_used: int = 0
    links_down: int = 0
    """NVLinks that are inactive, if others of the GPU are active."""


@dataclass(frozen=True)
class Gpus:
    found: tuple[Gpu, ...] = ()
    nccl: str = ""
    error: str = ""


@dataclass(frozen=True)
class Finding:
    """A check of one host or of a pair, the measured value, the threshold, and the command that fixes it."""

    group: str
    id: str
    level: str
    hosts: tuple[str, ...]
    measured: str
    threshold: str = ""
    fix: str = ""

    @property
    def line(self) -> str:
        threshold = f" ({self.threshold})" if self.threshold else ""
        fix = f"; fix: {self.fix}" if self.fix and self.level != PASS else ""
        return f"{self.level}  {self.id}  {' -> '.join(self.hosts)}: {self.measured}{threshold}{fix}"


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one machine; None: not requested."""

    index: int
    processes: int
    software: Software | None = None
    memory: Memory | None = None
    processors: Processors | None = None
    limits: Limits | None = None
    folders: tuple[Folder, ...] = ()
    network: NetworkFacts | None = None
    gpus: Gpus | None = None
    data: tuple[Finding, ...] = ()
    """Findings about a folder of data, judged where it was measured; their hosts are left out."""


@dataclass(frozen=True)
class PortTry:
    """A connection to one port of a node: ``open``, ``refused``, ``timed out``, ``no route``."""

    target: int
    port: int
    outcome: str


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
    """Bytes from one node to another over one connection."""

    source: int
    target: int
    bytes_per_second: float
    best: float = 0.0
    """The best 50 ms: the capacity of the path when both processors are free."""
    segments: int = 0
    retransmits: int = 0
    error: str = ""


@dataclass(frozen=True)
class NodeReport:
    """Everything that one node knows."""

    facts: NodeFacts
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
    """The complete result of an examination, the same on every node. ``addresses``: of all nodes of the list."""

    addresses: tuple[str, ...]
    reports: dict[int, NodeReport]
    groups: dict[int, GroupResult] = field(default_factory=dict)
    started_port: int = 6170
    difference: str = ""
    """What differs in the start of another node's doctor, so that the two did not meet; empty: nothing."""
    present: tuple[int, ...] = ()
    """The nodes that have come."""
    cut_off: str = ""
    """Why this node has no store of node 0, and so nobody else's report; empty: it has."""

    counts: tuple[int, ...] = ()
    """The numbers of processes that the node list gives, if they are unlike. Empty: the same on every node."""

    def host(self, index: int) -> str:
        return f"node {index} ({self.addresses[index]})" if len(self.addresses) > 1 else "this machine"


ABSENT = "absent"
"""The id of the finding that names a node that did not connect."""


def level_below(value: float, fail: float, warn: float) -> str:
    """The level of a value that must not be less than the thresholds."""
    return FAIL if value < fail else WARN if value < warn else PASS


def level_above(value: float, fail: float, warn: float) -> str:
    """The level of a value that must not be more than the thresholds."""
    return FAIL if value > fail else WARN if value > warn else PASS


def exit_code(findings: Iterable[Finding]) -> int:
    """0: no FAIL; 6: a node did not connect; 1: anything else has failed."""
    failed = [finding for finding in findings if finding.level == FAIL]
    if any(finding.id == ABSENT for finding in failed):
        return JoinTimeout.exit_code
    return 1 if failed else 0


def verdict(findings: Sequence[Finding], seconds: float) -> str:
    """The last line."""
    numbers = {level: sum(finding.level == level for finding in findings) for level in (FAIL, WARN, PASS)}
    counted = ", ".join(f"{number} {level}" for level, number in numbers.items() if number)
    word = "FAIL" if numbers[FAIL] else "OK, with warnings" if numbers[WARN] else "OK"
    failed = [f"{finding.id} on {' -> '.join(finding.hosts)}" for finding in findings if finding.level == FAIL]
    failed = list(dict.fromkeys(failed))
    named = f": {'; '.join(failed[:4])}{f'; and {len(failed) - 4} more' if len(failed) > 4 else ''}" if failed else ""
    return f"{word}{named} ({counted or 'nothing was examined'}, in {seconds:.0f} s)"


def size(number: float) -> str:
    """``1.5 GB`` and the like, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def rate(bytes_per_second: float) -> str:
    """``941 Mb/s``: the usual unit of networks."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.1f} Gb/s" if bits >= 10e9 else f"{bits / 1e6:.{0 if bits >= 10e6 else 2}f} Mb/s"


GROUPS = {
    "machine": "memory, processors, limits, /dev/shm, folders, a slow node",
    "software": "versions, package, profile and script, compared between hosts",
    "network": "names, routes, ports, MTU, proxies, clocks, latency, bandwidth, retransmits",
    "gpus": "driver, ECC, NVLink, NCCL (where there are GPUs)",
    "data": "the folder of --data: contents, unreadable images, reading speed beside --needs",
    "group": "one process per host forms a process group and adds exact integers",
}
"""The values of ``--only`` and ``--skip``, in the order in which findings are printed."""


@dataclass(frozen=True)
class DoctorOptions:
    """``groups``: what is examined. Times in seconds."""

    groups: tuple[str, ...] = tuple(GROUPS)
    join_timeout_seconds: float = timeouts.DOCTOR_JOIN_SECONDS
    strategy: str | None = None
    script: str | None = None
    log_dir: Path = Path("log")
    output_dir: Path = Path("runs")
    data: tuple[str, ...] = ()
    """The arguments of `fleet_train.data.measure`; empty: no folder of data was given."""
    verbose: bool = False
    """Whether what was passed is printed check by check."""

    @property
    def whole_seconds(self) -> float:
        longer = max(0.0, self.join_timeout_seconds - timeouts.DOCTOR_JOIN_SECONDS)
        return _DOCTOR_WHOLE_SECONDS + longer + (timeouts.DOCTOR_DATA_SECONDS if self.data else 0.0)


def chosen(only: Sequence[str], skip: Sequence[str]) -> tuple[str, ...]:
    """The groups selected by the flags. Raises ClusterError if none is left."""
    return chosen_groups(GROUPS, only, skip, "examine; the groups")
