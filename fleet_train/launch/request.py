"""The request of a launch command, parsed from its flags; pure text processing, nothing is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from fleet_train import timeouts
from fleet_train.cluster.cluster import (
    DEFAULT_JOIN_TIMEOUT_SECONDS,
    DEFAULT_STARTED_PORT,
    FAN_IN,
    is_number,
    refuse_repeated,
)
from fleet_train.errors import ClusterError

DEFAULT_HOST = "127.0.0.1"
AUTO, OFF, ON = "auto", "0", "1"
"""The values of ``--spares``."""


@dataclass(frozen=True)
class FaultPolicy:
    """What the launchers do after a failure. Times in seconds."""

    max_restarts: int = 0
    min_nodes: int | None = None
    """Continue with at least this many nodes if others do not come back. None: all nodes are needed."""
    rejoin_timeout_seconds: float = timeouts.REJOIN_SECONDS
    """How long to wait for a lost node, or for the launcher of node 0, before continuing or giving up."""
    lost_node_timeout_seconds: float = timeouts.LOST_NODE_SECONDS
    """A node whose launcher has sent no heartbeat for this long is lost."""
    grace_seconds: float = timeouts.GRACEFUL_STOP_SECONDS
    """How long ranks may take to save their state after SIGTERM."""
    spares: str = AUTO
    """Whether each rank has a spare process: OFF, ON, or AUTO for where memory allows it."""

    def in_words(self, node_num: int) -> str:
        """One line for --dry-run."""
        if self.max_restarts == 0:
            return "when a rank or node fails: the job ends (--max_restarts)"
        fewer = f"then the job continues with {self.min_nodes} or more" if self.min_nodes else "then the job ends"
        away = f"; a node is lost after {self.lost_node_timeout_seconds:g} s of silence and waited for "
        away += f"{self.rejoin_timeout_seconds:g} s, {fewer}"
        return f"when a rank or node fails: {self.max_restarts} restarts at most{away if node_num > 1 else ''}"


@dataclass(frozen=True)
class LaunchRequest:
    """The flags of one ``launch`` command. None means: not given."""

    command: tuple[str, ...]  # script (or module) and its arguments
    is_module: bool = False
    hosts: tuple[str, ...] | None = None
    counts: tuple[int | None, ...] = ()
    """The numbers of processes that the node list gives, one for each of ``hosts``. Empty: it gives none."""
    node_host: str | None = None
    by_name: bool = False
    """Whether ``hosts`` are names that stay the same when their addresses change."""
    started_port: int | None = None
    ports_per_node: int | None = None  # reserved by PaddleCloud
    selected_gpus: tuple[str, ...] | None = None
    processes_per_node: int | None = None
    strategy: str | None = None
    settings: tuple[str, ...] = ()
    """The texts of ``--set``, ``knob=value`` each."""
    log_dir: Path = Path("log")
    log_flag: str = "--log_dir"
    """The flag that the user has given it by, for messages: other commands launch as well."""
    join_timeout_seconds: float = DEFAULT_JOIN_TIMEOUT_SECONDS
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    job_id: str | None = None
    restarts: int = 0
    """How often an engine has started this job before."""
    run: str = ""
    """The engine's name for this job, the same in all its restarts; see `Started.run`."""
    secret_file: Path | None = None
    engine: str | None = None
    """What started the launchers: one of `fleet_train.cluster.engines.CHOICES`."""
    direct_ranks: int = FAN_IN
    """Up to this many ranks of the whole job connect to the leader's store directly; more use their node's relay."""
    verbose: bool = False
    """Show Paddle's own start-up lines of rank 0 as well."""
    strict: bool = False
    """Whether ranks that train without each other, or on the same samples, are an error."""
    verify_joint_batch: int = 0
    """In how many steps the ranks' gradient is compared with that of the joint batch."""
    trace: str = ""
    """The steps to trace, such as ``100-104``."""

    @property
    def first_port(self) -> int:
        return DEFAULT_STARTED_PORT if self.started_port is None else self.started_port


def read_job_id(text: str, name: str = "--job_id") -> str:
    """Raises ClusterError unless the name consists of letters, digits, and . _ : @ -"""
    if not re.fullmatch(r"[A-Za-z0-9._:@-]{1,100}", text):
        raise ClusterError(
            f"{name}={text[:100]!r}: a job's name is 1 to 100 letters, digits, dots, dashes, colons, @ or underscores"
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
