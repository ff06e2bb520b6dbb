"""The requested examination, and how long each part may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet_train.errors import ClusterError

GROUPS = {
    "machine": "memory, processors, limits, /dev/shm, folders, a slow node",
    "software": "versions, package, profile and script, compared between hosts",
    "network": "names, routes, ports, MTU, proxies, clocks, latency, bandwidth, retransmits",
    "gpus": "driver, ECC, NVLink, NCCL (where there are GPUs)",
    "group": "one process per host forms a process group and adds exact integers",
}
"""The values of ``--only`` and ``--skip``, in the order in which findings are printed."""
JOIN_SECONDS = 20.0
MOST_JOIN_SECONDS = 600.0
WHOLE_SECONDS = 56.0
"""From the start to the verdict, with the default ``--join_timeout``; the remaining time bounds each part."""
GROUP_SECONDS, GROUP_NEEDS_SECONDS = 25.0, 12.0
"""A group is abandoned after the first; with less than the second left it is not started."""


@dataclass(frozen=True)
class Options:
    """``groups``: what is examined. Times in seconds."""

    groups: tuple[str, ...] = tuple(GROUPS)
    join_timeout_seconds: float = JOIN_SECONDS
    strategy: str | None = None
    script: str | None = None
    log_dir: Path = Path("log")
    output_dir: Path = Path("runs")

    @property
    def whole_seconds(self) -> float:
        return WHOLE_SECONDS + max(0.0, self.join_timeout_seconds - JOIN_SECONDS)


def chosen(only: Sequence[str], skip: Sequence[str]) -> tuple[str, ...]:
    """The groups selected by the flags. Raises ClusterError if none is left."""
    left = tuple(group for group in GROUPS if (not only or group in only) and group not in skip)
    if not left:
        raise ClusterError(f"--only and --skip leave nothing to examine; the groups are {', '.join(GROUPS)}")
    return left
