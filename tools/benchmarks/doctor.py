"""Count the doctor's false alarms in many runs on emulated machines without a fault.

    sudo python tools/bench.py doctor --rounds 100 --record docs/benchmarks

Every WARN and FAIL is an alarm, except ``busy``: emulated machines share the processors of one, which may really be
busy. The record counts it separately. Needs root (tools/lab.py). Exit code 1: there was an alarm.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.jobs import Command, run_commands
from tools.benchmarks.record import Keep, circumstances, recorded, told_circumstances
from tools.lab import Lab

RATE = "1gbit"
_SECONDS = 60.0  # what the doctor promises
# In the machine's namespaces: a host name and a hosts file of its own; the exit code says only whether it has printed.
_ON_A_MACHINE = 'hostname "$1"; mount --bind "$2" /etc/hosts; out=$3; shift 3; "$@" > "$out" || test -s "$out"'


def run_once(folder: Path, nodes: int, flags: Sequence[str]) -> dict[str, Any]:
    """One clean run in its own lab: its alarms, its duration, the machine's load. Raises JobFailed."""
    load, commands = os.getloadavg()[0], list[Command]()
    with Lab(nodes, RATE) as lab:
        ips = ",".join(node.address for node in lab.nodes)
        for name, node in ((f"node{node.index}", node) for node in lab.nodes):
            (folder / f"{name}.hosts").write_text(f"127.0.0.1 localhost\n{node.address} {name}\n")
            doctor = [sys.executable, "-m", "fleet_train", "doctor", "--ips", ips, "--node_ip", node.address, "--json"]
            shell = ["unshare", "--mount", "--uts", "sh", "-ec", _ON_A_MACHINE, "sh", name]
            paths = [str(folder / f"{name}.hosts"), str(folder / f"{name}.json")]
            commands.append(([*node.prefix, *shell, *paths, *doctor, *flags], {}))
        run_commands("the doctor", commands, folder, _SECONDS, lab)
    made = json.loads((folder / "node0.json").read_text())
    found = [each for each in made["findings"] if each["level"] != "PASS"]
    alarms = [f"{each['id']} {each['hosts']}" for each in found if each["id"] != "busy"]
    return {"alarms": alarms, "busy": len(found) - len(alarms), "seconds": made["seconds"], "load": round(load, 2)}


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
