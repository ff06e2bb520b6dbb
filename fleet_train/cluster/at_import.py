"""What an import of fleet_train sets in this process's environment, as early as possible.

First the stock launcher's variables are corrected: under the recipe's old command its legacy mode gives every node
``PADDLE_TRAINER_ID`` and ``PADDLE_TRAINERS_NUM`` of a separate job, and scripts that read them shard their data as rank
0 of 1. The parent's command line describes the requested job. Then, before Paddle is imported, a rank that an engine
started gets the variables that make it compute faster, as one of our launcher has them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Container, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_train.cluster.flight.ring import start_under_a_launcher

if TYPE_CHECKING:
    from fleet_train.cluster.started import Started

ADVICE = "FLEET_TRAIN_ADVICE"
"""A JSON object of the variables that were set by default or for a profile, with their values."""
_LAUNCHER = "distributed"
_MISLEADING = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")

_launched: dict[str, str | None] = {}
"""The launcher's values of the corrected variables; None = it was not set."""


def correct_this_process() -> None:
    """Correct ``os.environ``, once; called when fleet_train is imported."""
    if not _launched:
        _launched.update(correct(os.environ, parent_command()))
    start_under_a_launcher()


def correct(environ: MutableMapping[str, str], command: Sequence[str]) -> dict[str, str | None]:
    """Make the environment describe the requested cluster; returns the previous values.

    Does nothing under other launchers, or if the command describes no usable cluster: ``fleet.init`` reports why.
    """
    if "PADDLE_TRAINER_ID" not in environ or "FLEET_TRAIN_STORE" in environ:
        return {}
    if not any(_LAUNCHER in word or "fleetrun" in word for word in command):
        return {}
    from fleet_train.cluster.cluster import Cluster  # later: every import of fleet_train imports this module
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


def parent_command() -> list[str]:
    """The argument list of the parent process; empty if the system does not provide it (not Linux)."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in raw.rstrip(b"\0").split(b"\0")]


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


def main_script() -> str:
    """The text of the running script; empty if it has no file."""
    try:
        return Path(getattr(sys.modules["__main__"], "__file__", None) or "").read_text(errors="replace")
    except OSError:
        return ""


def warning_of(script: str | None, environ: Mapping[str, str | None] | None = None) -> str:
    """The message about the correction for ``fleet.init``; empty if there was none."""
    before = _launched if environ is None else environ
    if not before:
        return ""
    text = (
        "the stock launcher set PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM for a job of this machine alone; they were "
        "corrected when fleet_train was imported. Code that read them before saw the wrong rank"
    )
    line = read_before_import(script) if script else None
    if line is None:
        return text
    return f"WARNING: {text}, and line {line} of the script is above that: move `import fleet_train` to its first line"


def advise_this_process(environ: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> None:
    """Set what ``launch`` would set, for a rank that an engine started; variables that are set stay. Call it before
    Paddle is imported."""
    if "paddle" in loaded:  # it has already read them
        return
    from fleet_train.cluster.engines import detect
    from fleet_train.errors import ClusterError

    try:
        started = detect(environ)
    except ClusterError:  # fleet.init reports it
        return
    if started is None or started.count < 2:
        return
    threads = threads_of_rank(environ, started, usable_processors(), os.cpu_count() or 1)
    advise(environ, advice_for_rank(threads, _computes_on_cpu(), is_amd_processor()))


def advise(environ: MutableMapping[str, str], advice: Mapping[str, str]) -> None:
    """Set those of ``advice`` that are not set, and note that they are ours: a profile may replace them."""
    set_noted(environ, {name: value for name, value in advice.items() if name not in environ})


def set_noted(environ: MutableMapping[str, str], values: Mapping[str, str]) -> None:
    """Set variables, and note that they are ours: a profile that is used later may replace them."""
    environ.update(values)
    environ[ADVICE] = json.dumps({**_noted(environ), **values})


def advised(environ: Mapping[str, str]) -> frozenset[str]:
    """The variables whose value is ours, by the launcher or in this process, from advice or from a profile, and neither
    the user's nor the script's."""
    return frozenset(name for name, value in _noted(environ).items() if environ.get(name) == value)


def _noted(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        noted = json.loads(environ.get(ADVICE, "{}"))
    except ValueError:
        return {}
    return noted if isinstance(noted, dict) else {}


def usable_processors() -> int:
    """Processors that this process may run on: fewer than the machine has under taskset, Slurm or a cpuset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_amd_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        return "AuthenticAMD" in cpuinfo.read_text(errors="replace")
    except OSError:
        return False


def advice_for_rank(threads: int, computes_on_cpu: bool, is_amd: bool) -> dict[str, str]:
    """The environment variables advised for a rank with ``threads`` processors of its own."""
    advice = {"OMP_NUM_THREADS": str(max(1, threads))}
    # One interpreter thread: as fast or faster on CPU. In program order: buckets then start as they become ready, and
    # on a GPU what is enqueued has one order.
    advice |= {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
    if computes_on_cpu and is_amd:
        # Intel MKL, which Paddle's wheel uses, chooses its slow path on AMD: 1.8 times slower.
        advice["MKL_DEBUG_CPU_TYPE"] = "5"
    return advice


def threads_of_rank(environ: Mapping[str, str], started: Started, usable: int, total: int) -> int:
    """The processors that Slurm or a binding assigned to this rank, else its share of the machine."""
    from fleet_train.cluster.cluster import is_number

    text = environ.get("SLURM_CPUS_PER_TASK", "")
    if is_number(text):
        return int(text)
    return usable if usable < total else usable // (started.local_count or 1)


def _computes_on_cpu() -> bool:
    from importlib import metadata  # 20 ms, for ranks of engines only

    try:
        metadata.version("paddlepaddle-gpu")
    except metadata.PackageNotFoundError:
        return True
    return False
