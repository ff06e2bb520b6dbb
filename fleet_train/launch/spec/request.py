"""What the launch command was asked for, read from its flags; pure text work, nothing is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from fleet_train.cluster.defaults import DEFAULT_JOIN_TIMEOUT_SECONDS, DEFAULT_STARTED_PORT
from fleet_train.cluster.hosts import is_number, refuse_repeated
from fleet_train.cluster.store.protocol.tree import FAN_IN
from fleet_train.errors import ClusterError

DEFAULT_HOST = "127.0.0.1"


@dataclass(frozen=True)
class FaultPolicy:
    """What the launchers do when something goes wrong. Times in seconds."""

    max_restarts: int = 0
    min_nodes: int | None = None
    """Go on with so many nodes when others do not come back. None: all nodes are needed."""
    rejoin_timeout_seconds: float = 300.0
    """How long to wait for a lost node, or for the launcher of node 0, before going on or giving up."""
    lost_node_timeout_seconds: float = 20.0
    """A node whose launcher has said nothing for so long is lost."""
    grace_seconds: float = 30.0
    """How long ranks may take to save their state after SIGTERM."""

    def in_words(self, node_num: int) -> str:
        """One line for --dry-run."""
        if self.max_restarts == 0:
            return "when a rank or node fails: the job ends (--max_restarts)"
        fewer = f"then the job goes on with {self.min_nodes} or more" if self.min_nodes else "then the job ends"
        away = f"; a node is lost after {self.lost_node_timeout_seconds:g} s of silence and waited for "
        away += f"{self.rejoin_timeout_seconds:g} s, {fewer}"
        return f"when a rank or node fails: {self.max_restarts} restarts at most{away if node_num > 1 else ''}"


@dataclass(frozen=True)
class LaunchRequest:
    """The flags of one ``launch`` command. None means: not given."""

    command: tuple[str, ...]  # script (or module) and its arguments
    is_module: bool = False
    hosts: tuple[str, ...] | None = None
    node_host: str | None = None
    by_name: bool = False
    """Whether ``hosts`` are names that stay when their addresses change."""
    started_port: int | None = None
    ports_per_node: int | None = None  # that PaddleCloud has set aside
    selected_gpus: tuple[str, ...] | None = None
    processes_per_node: int | None = None
    strategy: str | None = None
    log_dir: Path = Path("log")
    join_timeout_seconds: float = DEFAULT_JOIN_TIMEOUT_SECONDS
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    job_id: str | None = None
    restarts: int = 0
    """How often an engine has started this job before."""
    run: str = ""
    """What that engine calls this job in all its restarts; see `Started.run`."""
    secret_file: Path | None = None
    engine: str | None = None
    """Who has started the launchers: one of `fleet_train.cluster.engines.CHOICES`."""
    direct_ranks: int = FAN_IN
    """Up to so many ranks in the whole job speak to the leader's store themselves; more do over their node's relay."""
    verbose: bool = False
    """Show Paddle's own start-up lines of rank 0 as well."""

    @property
    def first_port(self) -> int:
        return DEFAULT_STARTED_PORT if self.started_port is None else self.started_port


def read_job_id(text: str, name: str = "--job_id") -> str:
    """Raises ClusterError unless it is a name that can stand in a message: letters, digits, and . _ : @ -"""
    if not re.fullmatch(r"[A-Za-z0-9._:@-]{1,100}", text):
        raise ClusterError(
            f"{name}={text[:100]!r}: 1 to 100 letters, digits, dots, dashes, colons, @ or underscores name a job"
        )
    return text


def parse_devices(text: str, flag: str = "--selected_gpus") -> tuple[str, ...]:
    """``"0,1"`` -> ``("0", "1")``. Raises ClusterError for anything but different whole numbers."""
    devices = tuple(part.strip() for part in text.split(","))
    wrong = [device for device in devices if not is_number(device)]
    if wrong:
        raise ClusterError(f"{flag}={text}: {wrong[0]!r} is not a device number; write for example {flag}=0,1")
    devices = tuple(str(int(device)) for device in devices)
    refuse_repeated(devices, f"{flag}={text}", "each device serves one process")
    return devices
