"""Role makers: how a process finds out which rank it is. Fleet's names, kept for the scripts that use them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet_train.cluster import Cluster, cluster_from_environ
from fleet_train.errors import ClusterError


class PaddleCloudRoleMaker:
    """Reads the rank from what the launcher (ours, Paddle's, or PaddleCloud's) has set.

    Only collective training exists here: ``is_collective=False`` (parameter servers) is refused.
    """

    def __init__(self, is_collective: bool = False, **options: Any) -> None:
        if not is_collective:
            raise ClusterError(
                "PaddleCloudRoleMaker(is_collective=False) asks for parameter servers; fleet_train is for collective "
                "training: write PaddleCloudRoleMaker(is_collective=True)"
            )
        if options:
            raise ClusterError(
                f"PaddleCloudRoleMaker does not know {', '.join(sorted(options))}; it takes is_collective"
            )

    def cluster(self, environ: Mapping[str, str] = os.environ) -> Cluster:
        """The cluster that the launch environment, or the launcher's own command line, describes."""
        return cluster_from_environ(environ, parent_command())


def parent_command() -> list[str]:
    """The argument list of the parent process; empty where the system does not tell (not Linux)."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in raw.rstrip(b"\0").split(b"\0")]


def cluster_of(role: Any) -> Cluster:
    """The cluster for what was handed to ``fleet.init``: our role maker, None, or Paddle's own role maker."""
    if role is None:
        return PaddleCloudRoleMaker(is_collective=True).cluster()
    if isinstance(role, PaddleCloudRoleMaker):
        return role.cluster()
    if type(role).__name__ == "PaddleCloudRoleMaker" and type(role).__module__.startswith("paddle."):
        return PaddleCloudRoleMaker(is_collective=bool(getattr(role, "_is_collective", False))).cluster()
    raise ClusterError(
        f"fleet.init was given {type(role).__name__}; it takes role_maker.PaddleCloudRoleMaker(is_collective=True) "
        "or nothing"
    )
