"""Count the doctor's false alarms in many runs on emulated machines without a fault.

    sudo python tools/bench.py doctor --rounds 100 --record docs/benchmarks

Every WARN and FAIL is an alarm, except ``busy``: emulated machines share the processors of one, which may really be
busy. The record counts it separately. Needs root (tools/lab.py). Exit code 1: there was an alarm.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from tests.integration.doctor.sick import HEALTHY, examine

from tools.benchmarks.record import Keep, circumstances, recorded, told_circumstances
from tools.lab import Lab

RATE = "1gbit"


def run_once(folder: Path, nodes: int, flags: tuple[str, ...]) -> dict[str, Any]:
    """One clean run in its own lab: its alarms, its duration, the machine's load."""
    load = os.getloadavg()[0]
    with Lab(nodes, RATE) as lab:
        first = examine(folder, lab.nodes, [HEALTHY] * nodes, *flags)[0]
    busy = len(first.findings("busy", "WARN"))
    return {"alarms": first.alarms, "busy": busy, "seconds": first.made["seconds"], "load": round(load, 2)}


def page(at: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], nodes: int) -> list[str]:
    alarms = Counter(alarm for one in runs for alarm in one["alarms"])
    loads, seconds = [one["load"] for one in runs], [one["seconds"] for one in runs]
    return [
        f"# False alarms of the doctor, {at['date'][:10]}",
        "",
        f"- {sum(bool(one['alarms']) for one in runs)} of {len(runs)} runs gave an alarm, each on {nodes} emulated",
        "  machines without a fault.",
        *told_circumstances(at, f"links of {RATE}"),
        f"- Load average before the runs: {min(loads)} to {max(loads)}. Seconds of a run: median "
        f"{statistics.median(seconds)}, longest {max(seconds)}.",
        f"- `busy`, counted separately, was reported in {sum(bool(one['busy']) for one in runs)} runs: all nodes share",
        "  these processors, and other programs ran on them.",
        "",
        "Alarms:",
        "",
        *([f"- {number} times: {name}" for name, number in alarms.items()] or ["- none"]),
    ]


@click.command(context_settings={"show_default": True})
@click.option("--nodes", default=2, type=click.IntRange(2, 16), help="Emulated machines.")
@click.option("--group/--no_group", default=False, help="Also form a process group in each run.")
@recorded(100, "each is a run in a lab of its own")
def main(nodes: int, group: bool, rounds: int, keep: Keep) -> None:
    at, runs = circumstances(), list[dict[str, Any]]()
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory(prefix="ft-doctor-") as folder:
            runs.append(run_once(Path(folder), nodes, () if group else ("--skip", "group")))
        click.echo(f"run {number} of {rounds}: {', '.join(runs[-1]['alarms']) or 'no alarm'}")
        keep({"circumstances": at, "nodes": nodes, "group": group, "rounds": runs}, page(at, runs, nodes))
    click.echo("\n".join(page(at, runs, nodes)))
    if any(one["alarms"] for one in runs):
        raise SystemExit(1)
