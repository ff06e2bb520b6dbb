"""Corrects wrong variables of the stock launcher's legacy mode as early as possible: when fleet_train is imported.

Under the recipe's old command every node gets ``PADDLE_TRAINER_ID`` and ``PADDLE_TRAINERS_NUM`` of a separate job,
and scripts that read them shard their data as rank 0 of 1. The parent's command line describes the requested job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

_LAUNCHER = "distributed"
_MISLEADING = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")

_launched: dict[str, str | None] = {}
"""The launcher's values of the corrected variables; None = it was not set."""


def parent_command() -> list[str]:
    """The argument list of the parent process; empty if the system does not provide it (not Linux)."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in raw.rstrip(b"\0").split(b"\0")]


def correct(environ: MutableMapping[str, str], command: Sequence[str]) -> dict[str, str | None]:
    """Make the environment describe the requested cluster; returns the previous values.

    Does nothing under other launchers, or if the command describes no usable cluster: ``fleet.init`` reports why.
    """
    if "PADDLE_TRAINER_ID" not in environ or "FLEET_TRAIN_STORE" in environ:
        return {}
    if not any(_LAUNCHER in word or "fleetrun" in word for word in command):
        return {}
    from fleet_train.cluster.cluster import Cluster
    from fleet_train.cluster.environment import cluster_from_environ, is_legacy_launch, rank_variables
    from fleet_train.errors import ClusterError

    if not is_legacy_launch(command):
        return {}
    try:
        cluster = cluster_from_environ(environ, command)
    except ClusterError:
        return {}
    if not isinstance(cluster, Cluster):
        return {}
    wanted = rank_variables(cluster)
    before = {name: environ.get(name) for name, value in wanted.items() if environ.get(name) != value}
    environ.update(wanted)
    return before


def correct_this_process() -> None:
    """Correct ``os.environ``, once; called when fleet_train is imported."""
    if not _launched:
        _launched.update(correct(os.environ, parent_command()))


def launch_environment() -> dict[str, str]:
    """The environment as the launcher set it: what ``cluster_from_environ`` reads."""
    environ = dict(os.environ)
    for name, value in _launched.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


def read_before_import(source: str) -> int | None:
    """The first line (1, 2, ...) of a script that reads a misleading variable, or asks Paddle for the rank, above its
    import of fleet_train; None if there is none.
    """
    for number, line in enumerate(source.splitlines(), start=1):
        code = line.partition("#")[0]
        if re.match(r"\s*(from|import)\s+fleet_train\b", code):
            return None
        if any(name in code for name in _MISLEADING) or re.search(r"\b(get_rank|get_world_size|ParallelEnv)\(", code):
            return number
    return None


def warning_of(main_script: str | None, environ: Mapping[str, str | None] | None = None) -> str:
    """The message about the correction for ``fleet.init``; empty if there was none."""
    before = _launched if environ is None else environ
    if not before:
        return ""
    text = (
        "the stock launcher set PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM for a job of this machine alone; they were "
        "corrected when fleet_train was imported. Code that read them before saw the wrong rank"
    )
    line = read_before_import(main_script) if main_script else None
    if line is None:
        return text
    return f"WARNING: {text}, and line {line} of the script is above that: move `import fleet_train` to its first line"
