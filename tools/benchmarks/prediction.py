"""Predicted and measured steps: `recommend` with trials of every profile, on emulated networks, in one table.

    sudo python tools/bench.py prediction --rounds 3 --record docs/benchmarks

Each network is a lab (tools/lab.py, root) of two machines, the task one of the benchmarks'. A round is one `recommend`
on each network; the page has every profile's predicted and measured step, medians over the rounds, and for each
network the profile that `recommend` picks with its default number of trials beside the best one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.jobs import Command, Place, run_commands
from tools.benchmarks.networks import TASKS
from tools.benchmarks.record import ROOT, Keep, circumstances, recorded, spread, table, told_circumstances
from tools.lab import Lab

_FIRST_PORT = 6400
# The default number of trials of `recommend`.
_BY_DEFAULT = 4
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
    def error(self) -> float:
        """Relative error of the medians."""
        return abs(statistics.median(self.predicted) / statistics.median(self.measured) - 1)


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
    return ["sh", "-c", '"$@" > "$0"', str(folder / f"node{node}.json"), *command, *script]


def rows_of(rate: str, rounds: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows of what most rounds tried: rounds differ in which changes of a profile's knobs they predict to help."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for made in rounds:
        for one in made["profiles"]:
            if one["measured_ms"] is not None:
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
        *(_pick(rate, made) for rate, rounds in networks.items() for made in rounds),
    ]


def _range(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return spread(values, middle, 1) if len(values) > 1 else f"{middle:.1f}"


def _pick(rate: str, made: dict[str, Any]) -> str:
    tried = [one for one in made["profiles"] if one["measured_ms"] is not None]
    tried.sort(key=lambda one: float(one["predicted_ms"]))
    pick, best = (min(some, key=lambda one: float(one["measured_ms"])) for some in (tried[:_BY_DEFAULT], tried))
    return (
        f"- {rate}: with the default of {_BY_DEFAULT} trials it picks {pick['name']}, "
        f"{pick['measured_ms'] / best['measured_ms']:.2f} of the best measured ({best['name']})"
    )


@click.command(context_settings={"show_default": True})
@click.option("--task", "task_name", type=click.Choice(sorted(TASKS)), default="mlp", help="What is trained.")
@click.option("--network", "rates", multiple=True, default=("100mbit", "1gbit", "none"), help="Its rate; repeat.")
@click.option("--nodes", default=2, help="Emulated machines.")
@click.option("--trials", default=20, help="Number of profiles tried on each network.")
@click.option("--seconds", default=600.0, help="Approximate time limit of one network.")
@recorded(1, "each measures every network once")
def main(
    task_name: str, rates: tuple[str, ...], nodes: int, trials: int, seconds: float, rounds: int, keep: Keep
) -> None:
    at, made = circumstances(), defaultdict[str, list[dict[str, Any]]](list)
    for number, rate in ((number, rate) for number in range(1, rounds + 1) for rate in rates):
        with tempfile.TemporaryDirectory(prefix="bench_prediction_") as folder:
            made[rate].append(recommendation(task_name, rate, nodes, trials, seconds, Path(folder)))
        keep({"circumstances": at, "task": task_name, "networks": made}, page(task_name, at, made))
        click.echo(f"round {number} of {rounds}, {rate}: measured", err=True)
    click.echo("\n".join(page(task_name, at, made)))


def page(task: str, at: Mapping[str, Any], made: Networks) -> list[str]:
    return [
        f"# Predicted and measured steps, {task}, two machines",
        "",
        *told_circumstances(at, "CPU and Gloo, an emulated network"),
        "- *predicted*: by `recommend`, before its trials, from what it had measured; *measured*: its trials of a few "
        "dozen steps. Medians over the rounds, with the smallest and largest.",
        "",
        *figures(made),
    ]
