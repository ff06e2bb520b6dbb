"""What takes a lab of emulated machines: the error of predicted steps, and false alarms of the doctor."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from scipy.stats import spearmanr

from tools.benchmarks.jobs import Command, Place, run_commands
from tools.benchmarks.record import ROOT, Keep, circumstances, recorded, spread, table, told_circumstances
from tools.benchmarks.tasks import TASKS
from tools.lab import Lab

ALARMS_RATE = "1gbit"
_SECONDS = 60.0  # what the doctor promises
# In the machine's namespaces: a host name and a hosts file of its own; the exit code says only whether it has printed.
_ON_A_MACHINE = 'hostname "$1"; mount --bind "$2" /etc/hosts; out=$3; shift 3; "$@" > "$out" || test -s "$out"'


def run_once(folder: Path, nodes: int, flags: Sequence[str]) -> dict[str, Any]:
    """One clean run in its own lab: its alarms, its duration, the machine's load. Raises JobFailed."""
    load, commands = os.getloadavg()[0], list[Command]()
    with Lab(nodes, ALARMS_RATE) as lab:
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


def alarms_page(at: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], nodes: int) -> list[str]:
    alarms = Counter(alarm for one in runs for alarm in one["alarms"])
    loads, seconds = [one["load"] for one in runs], [one["seconds"] for one in runs]
    return [
        f"# False alarms of the doctor, {at['date'][:10]}",
        "",
        f"- {sum(bool(one['alarms']) for one in runs)} of {len(runs)} runs gave an alarm, each on {nodes} emulated",
        "  machines without a fault.",
        *told_circumstances(at, f"links of {ALARMS_RATE}"),
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
def doctor_alarms(nodes: int, group: bool, rounds: int, keep: Keep) -> None:
    """Count the doctor's false alarms in many runs on emulated machines without a fault.

        sudo .venv/bin/python tools/bench.py doctor --rounds 100 --record docs/benchmarks

    Every WARN and FAIL is an alarm, except ``busy``: emulated machines share the processors of one, which may really
    be busy. The record counts it separately. Needs root (tools/lab.py). Exit code 1: there was an alarm.
    """
    at, runs = circumstances(), list[dict[str, Any]]()
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory(prefix="ft-doctor-") as folder:
            runs.append(run_once(Path(folder), nodes, () if group else ("--skip", "group")))
        click.echo(f"run {number} of {rounds}: {', '.join(runs[-1]['alarms']) or 'no alarm'}")
        keep({"circumstances": at, "nodes": nodes, "group": group, "rounds": runs}, alarms_page(at, runs, nodes))
    click.echo("\n".join(alarms_page(at, runs, nodes)))
    if any(one["alarms"] for one in runs):
        raise SystemExit(1)


_FIRST_PORT = 6400
# The default number of trials of `recommend`.
BY_DEFAULT = 4
_RISKS = ("rounding", "lossy", "local_steps")
Networks = Mapping[str, Sequence[dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """One profile on one network: milliseconds of each round that tried it."""

    rate: str
    name: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def step_ms(self) -> float:
        """The median of what trials measured."""
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        """Relative error of the medians."""
        return abs(statistics.median(self.predicted) / self.step_ms - 1)


def recommendation(task: str, rate: str, nodes: int, trials: int, seconds: float, folder: Path) -> dict[str, Any]:
    """What `recommend --json` printed on rank 0 of a lab of this rate. Raises JobFailed."""
    with Lab(nodes, rate) as lab:
        place = Place(lab, 1, _FIRST_PORT)
        commands: list[Command] = [(_command(task, place, folder, node, trials, seconds), {}) for node in range(nodes)]
        run_commands(f"recommend over {rate}", commands, folder, 3 * seconds + 120, lab)
    made: dict[str, Any] = json.loads((folder / "node0.json").read_text())
    return made


def _command(task: str, place: Place, folder: Path, node: int, trials: int, seconds: float) -> list[str]:
    flags = ["--ips", ",".join(place.addresses), "--node_ip", place.addresses[node], "--nproc", "1"]
    flags += ["--started_port", str(place.port), "--trials", str(trials), "--seconds", f"{seconds:g}", "--json"]
    flags += [word for risk in _RISKS for word in ("--allow", risk)]
    flags += ["--record", str(folder / f"runs{node}"), "--output", str(folder / f"node{node}.yaml")]
    command = [*place.lab.nodes[node].prefix, sys.executable, "-m", "fleet_train", "recommend", *flags]
    script = ["--script", str(ROOT / "tools" / "benchmarks" / "ranks.py"), "task", task]
    # Only JSON on stdout: other lines go to the job's log.
    return ["sh", "-c", 'exec "$@" > "$0"', str(folder / f"node{node}.json"), *command, *script]


def tried(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The profiles that a round measured."""
    return [one for one in made["profiles"] if one["measured_ms"] is not None]


def rows_of(rate: str, rounds: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows of what most rounds tried: rounds differ in which changes of a profile's knobs they predict to help."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for made in rounds:
        for one in tried(made):
            pairs[one["name"]].append((one["predicted_ms"], one["measured_ms"]))
    columns = {name: list(zip(*found, strict=True)) for name, found in pairs.items() if 2 * len(found) > len(rounds)}
    return [Row(rate, name, tuple(predicted), tuple(measured)) for name, (predicted, measured) in columns.items()]


def figures(networks: Networks) -> list[str]:
    """Every row, then the errors, and how far each recommendation is from the best of its round."""
    rows = [row for rate, rounds in networks.items() for row in rows_of(rate, rounds)]
    cells = [(row.rate, row.name, *map(_range, (row.predicted, row.measured)), f"{row.error:.0%}", len(row.measured))
             for row in rows]  # fmt: skip
    errors = [row.error for row in rows]
    return [
        *table(("network", "profile", "predicted ms", "measured ms", "error", "rounds"), cells),
        "",
        f"{len(rows)} steps: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}",
        "",
        *(
            f"- {rate}: rank correlation of predicted and measured steps {rho:.2f} (Spearman's, {count} profiles)"
            for rate, (rho, count) in rank_correlations(networks).items()
        ),
        "",
        *(_pick(rate, made) for rate, rounds in networks.items() for made in rounds),
    ]


def rank_correlations(networks: Networks) -> dict[str, tuple[float, int]]:
    """Spearman's of the profiles' median predicted and measured steps by network, and of how many profiles: whether
    the order is right, whatever the error."""
    found = {}
    for rate, rounds in networks.items():
        rows = rows_of(rate, rounds)
        predicted, measured = [statistics.median(row.predicted) for row in rows], [row.step_ms for row in rows]
        found[rate] = (float(spearmanr(predicted, measured).statistic), len(rows))
    return found


def _range(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return spread(values, middle, 1) if len(values) > 1 else f"{middle:.1f}"


def best_by_default_and_of_all(made: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the profiles that a round tried: the shortest step of those that the default number of trials would have had,
    and that of all."""
    every = sorted(tried(made), key=lambda one: float(one["predicted_ms"]))
    pick, best = (min(some, key=lambda one: float(one["measured_ms"])) for some in (every[:BY_DEFAULT], every))
    return pick, best


def _pick(rate: str, made: dict[str, Any]) -> str:
    pick, best = best_by_default_and_of_all(made)
    return (
        f"- {rate}: with the default of {BY_DEFAULT} trials it picks {pick['name']}, "
        f"{pick['measured_ms'] / best['measured_ms']:.2f} of the best measured ({best['name']})"
    )


@click.command(context_settings={"show_default": True})
@click.option("--task", "task_name", type=click.Choice(list(TASKS)), default="bytes", help="What is trained.")
@click.option("--network", "rates", multiple=True, default=("100mbit", "1gbit", "none"), help="Its rate; repeat.")
@click.option("--nodes", default=2, help="Emulated machines.")
@click.option("--trials", default=20, help="Number of profiles tried on each network.")
@click.option("--seconds", default=600.0, help="Approximate time limit of one network.")
@recorded(1, "each measures every network once")
def prediction(
    task_name: str, rates: tuple[str, ...], nodes: int, trials: int, seconds: float, rounds: int, keep: Keep
) -> None:
    """Predicted and measured steps: `recommend` with trials of every profile, on emulated networks, in one table.

        sudo .venv/bin/python tools/bench.py prediction --rounds 3 --record docs/benchmarks

    Each network is a lab (tools/lab.py, root) of two machines, the task one of the benchmarks'. A round is one
    `recommend` on each network; the page has every profile's predicted and measured step, medians over the rounds, and
    for each network the profile that `recommend` picks with its default number of trials beside the best one.
    """
    begun = keep.begun({"circumstances": circumstances(), "task": task_name, "networks": {}})
    at, made = begun["circumstances"], defaultdict[str, list[dict[str, Any]]](list, begun["networks"])
    for number, rate in ((number, rate) for number in range(1, rounds + 1) for rate in rates):
        if len(made[rate]) >= number:
            continue
        with tempfile.TemporaryDirectory(prefix="bench_prediction_") as folder:
            made[rate].append(recommendation(task_name, rate, nodes, trials, seconds, Path(folder)))
        keep({"circumstances": at, "task": task_name, "networks": made}, prediction_page(task_name, at, made))
        click.echo(f"round {number} of {rounds}, {rate}: measured", err=True)
    click.echo("\n".join(prediction_page(task_name, at, made)))


def prediction_page(task: str, at: Mapping[str, Any], made: Networks) -> list[str]:
    return [
        f"# Predicted and measured steps, {task}, two machines",
        "",
        *told_circumstances(at, "CPU and Gloo, an emulated network"),
        "- *predicted*: by `recommend`, before its trials, from what it had measured; *measured*: its trials of a few "
        "dozen steps. Medians over the rounds, with the smallest and largest.",
        "",
        *figures(made),
    ]
