"""Count the doctor's false alarms in many runs on emulated machines without a fault.

    sudo python tools/doctor_clean_runs.py --runs 100 --output docs/benchmarks/DATE-doctor-clean-runs.json

Every WARN and FAIL is an alarm, except ``busy``: emulated machines share the processors of one, which may really be
busy. The record counts it separately.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fleet_train.cluster.installed import (  # noqa: E402
    git,
    processor,
)
from fleet_train.files import publish_where_linked  # noqa: E402
from tests.integration.doctor.sick import HEALTHY, examine  # noqa: E402
from tools.lab import Lab, why_no_lab  # noqa: E402

RATE = "1gbit"


def run_once(folder: Path, nodes: int, flags: tuple[str, ...]) -> dict[str, Any]:
    """One clean run in its own lab: its alarms, its duration, the machine's load."""
    load = os.getloadavg()[0]
    with Lab(nodes, RATE) as lab:
        first = examine(folder, lab.nodes, [HEALTHY] * nodes, *flags)[0]
    busy = len(first.findings("busy", "WARN"))
    made = first.made
    return {"alarms": first.alarms, "busy": busy, "seconds": made["seconds"], "load": round(load, 2)}


def record_of(runs: list[dict[str, Any]], nodes: int, flags: tuple[str, ...]) -> dict[str, Any]:
    alarms = Counter(alarm for one in runs for alarm in one["alarms"])
    seconds = sorted(one["seconds"] for one in runs)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git(ROOT, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(git(ROOT, "status", "--porcelain", "--", "fleet_train")),
        "machine": {"processor": processor(), "processors": os.cpu_count(), "kernel": platform.release().split("-")[0]},
        "nodes": nodes,
        "rate": RATE,
        "flags": list(flags),
        "runs": len(runs),
        "runs_with_alarms": sum(bool(one["alarms"]) for one in runs),
        "alarms": dict(alarms),
        "runs_that_said_busy": sum(bool(one["busy"]) for one in runs),
        "seconds": {"median": seconds[len(seconds) // 2], "longest": seconds[-1]},
        "load_average": {"least": min(one["load"] for one in runs), "most": max(one["load"] for one in runs)},
    }


def page(record: dict[str, Any]) -> str:
    """The page of the record."""
    machine, load, seconds = record["machine"], record["load_average"], record["seconds"]
    changes = " with uncommitted changes" * record["uncommitted_changes"]
    alarms = [f"- {number} times: {name}" for name, number in record["alarms"].items()] or ["- none"]
    lines = [
        f"# False alarms of the doctor, {record['date'][:10]}",
        "",
        f"- {record['runs_with_alarms']} of {record['runs']} runs gave an alarm, each on {record['nodes']} emulated",
        "  machines without a fault.",
        f"- Machine: {machine['processor']}, {machine['processors']} processors for all nodes, Linux "
        f"{machine['kernel']}; load average {load['least']} to {load['most']} before the runs.",
        f"- Links of {record['rate']}; commit {record['commit'][:10]}{changes}; flags "
        f"`{' '.join(record['flags']) or 'none'}`.",
        f"- Seconds of a run: median {seconds['median']}, longest {seconds['longest']}.",
        f"- `busy`, counted separately, was reported in {record['runs_that_said_busy']} runs: all nodes share these",
        "  processors, and other programs ran on them.",
        "",
        "Alarms:",
        "",
        *alarms,
    ]
    return "\n".join([*lines, ""])


def write(output: Path, record: dict[str, Any]) -> None:
    publish_where_linked(output, f"{json.dumps(record, indent=1)}\n".encode())
    publish_where_linked(output.with_suffix(".md"), page(record).encode())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", default=100, show_default=True, type=click.IntRange(1), help="How often.")
@click.option("--nodes", default=2, show_default=True, type=click.IntRange(2, 16), help="Emulated machines.")
@click.option("--group/--no_group", default=False, show_default=True, help="Also form a process group in each run.")
@click.option("--output", type=Path, help="The record (.json, and a .md beside it), rewritten after every run.")
def main(runs: int, nodes: int, group: bool, output: Path | None) -> None:
    """Count the doctor's false alarms. Needs root. Exit code 1: there was one."""
    if reason := why_no_lab():
        raise click.ClickException(reason)
    flags = () if group else ("--skip", "group")
    done: list[dict[str, Any]] = []
    for number in range(runs):
        with tempfile.TemporaryDirectory(prefix="ft-doctor-") as folder:
            began = time.monotonic()
            done.append(run_once(Path(folder), nodes, flags))
        told = ", ".join(done[-1]["alarms"]) or "no alarm"
        click.echo(f"run {number + 1} of {runs}: {told} ({time.monotonic() - began:.0f} s)")
        if output is not None:
            write(output, record_of(done, nodes, flags))
    made = record_of(done, nodes, flags)
    click.echo(f"{made['runs_with_alarms']} of {runs} runs with an alarm")
    sys.exit(1 if made["runs_with_alarms"] else 0)


if __name__ == "__main__":
    main()
