"""``fleet_train version``: what a bug report needs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from typing import Any

import click

from fleet_train.cli.options import HELP
from fleet_train.log import columns

_VARIABLES = ("FLEET_TRAIN_", "PADDLE_", "FLAGS_", "GLOO_", "NCCL_", "GLOG_", "OMP_", "MKL_", "CUDA_", "KMP_")
_GIB = 1 << 30

_EPILOG = """\b
Examples:
  fleet_train version
  fleet_train version --json
  fleet_train --version              (one line)

\b
The output has no host name, address, path or value of a variable: it can be pasted into a bug report.
Paddle is not imported; fleet_train selftest checks whether it works.
"""


@click.command(epilog=_EPILOG, context_settings=HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of text for people.")
def command(as_json: bool) -> None:
    """Show versions, Paddle's build, machine, limits, GPUs and the engine of this process for a bug report."""
    facts = facts_of(os.environ)
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))


def facts_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """All facts, as in the JSON output; unavailable ones are absent or empty."""
    from fleet_train.cluster import installed

    return {
        "fleet_train": installed.own_version(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "paddle": installed.paddle_build(),
        "packages": installed.package_versions(),
        "system": installed.system(),
        "processor": installed.processor(),
        "cores": installed.cores(),
        "memory": installed.memory(),
        "limits": installed.limits(),
        "container": installed.container(environ),
        "gpus": installed.gpus(),
        "engine": _engine(environ),
        "variables": sorted(name for name in environ if name.startswith(_VARIABLES)),
    }


def _engine(environ: Mapping[str, str]) -> str:
    """The name of the engine that has started this process, as ``--engine`` takes it, or ``none``.

    It does not contain the engine's job name and hosts: those are values of variables.
    """
    from fleet_train.cluster.engines import CHOICES, detect
    from fleet_train.errors import ClusterError

    try:
        started = detect(environ)
        if started is None:
            return "none"
        named = (name for name in CHOICES if name not in ("auto", "none") and _is_started_by(environ, name, started))
        return f"{next(named, 'unknown')}: process {started.index} of {started.count}"
    except ClusterError:
        return "its variables contradict each other or are incomplete: launch --dry-run says how"


def _is_started_by(environ: Mapping[str, str], name: str, started: Any) -> bool:
    from fleet_train.cluster.engines import detect
    from fleet_train.errors import ClusterError

    try:
        return bool(detect(environ, name) == started)
    except ClusterError:
        return False


def _lines(facts: Mapping[str, Any]) -> list[str]:
    rows = {
        "fleet_train": _own(facts["fleet_train"]),
        "python": facts["python"],
        "paddle": _paddle(facts["paddle"]),
        **facts["packages"],
        "system": facts["system"],
        "processor": f"{facts['processor']}, {facts['cores']['usable']} of {facts['cores']['total']} cores usable",
        "memory": _memory(facts["memory"]),
        "cgroup": _limits(facts["limits"]),
        "container": facts["container"] or "none",
        "gpus": _gpus(facts["gpus"]),
        "engine": facts["engine"],
        "variables": ", ".join(facts["variables"]) or "none of ours or Paddle's is set",
    }
    return columns(list(rows.items()))


def _own(own: dict[str, Any]) -> str:
    if "commit" not in own:
        return f"{own['version']} ({own['from']})"
    changes = " with uncommitted changes" if own["uncommitted_changes"] else ""
    return f"{own['version']} ({own['from']}, commit {own['commit'][:10]}{changes})"


def _paddle(paddle: Mapping[str, str]) -> str:
    if not paddle:
        return "absent"
    more = "".join(f", {name} {paddle[name]}" for name in ("cuda", "cudnn", "nccl") if name in paddle)
    head = f"{paddle['version']} ({paddle['distribution']}, {paddle['build']} build"
    return f"{head}, commit {paddle['commit'][:10]}{more})"


def _memory(memory: Mapping[str, int]) -> str:
    if "total_bytes" not in memory:
        return "unknown"
    free = f", {memory['available_bytes'] / _GIB:.1f} GiB available" if "available_bytes" in memory else ""
    return f"{memory['total_bytes'] / _GIB:.1f} GiB{free}"


def _limits(limits: Mapping[str, float]) -> str:
    cores = f"{limits['cores']:g} cores" if "cores" in limits else ""
    memory = f"{limits['memory_bytes'] / _GIB:.1f} GiB of memory" if "memory_bytes" in limits else ""
    return ", ".join(part for part in (cores, memory) if part) or "no limit"


def _gpus(gpus: Mapping[str, Any]) -> str:
    models = gpus.get("models", [])
    shown = ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))
    driver = f"driver {gpus['driver']}" if "driver" in gpus else ""
    return "; ".join(part for part in (shown, driver) if part) or "none"
