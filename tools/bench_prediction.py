"""Predicted against measured steps: `recommend` with every profile tried, on emulated networks, in one table.

    sudo python tools/bench_prediction.py --rate 100mbit --rate 1gbit --rate none --output docs/benchmarks/prediction

Each network is a lab (tools/lab.py, root) of two machines, the task one of the benchmark's. The record has, for each
network, every profile's predicted and measured step, the pick, and the profile whose measured step was the shortest.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from tools.benchmarks import record
from tools.benchmarks.jobs import ROOT, Place, run_commands
from tools.benchmarks.task import TASKS
from tools.lab import Lab

_FIRST_PORT = 6400
_SCRIPT = ROOT / "tools" / "examples" / "task_of_the_benchmark.py"
_RISKS = ("rounding", "lossy", "local_steps")


@dataclass(frozen=True)
class Row:
    """One profile on one network, in milliseconds."""

    rate: str
    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


def recommendation(task: str, rate: str, nodes: int, trials: int, seconds: float, folder: Path) -> dict[str, Any]:
    """What `recommend --json` printed on rank 0 of a lab of this rate. Raises JobFailed."""
    with Lab(nodes, rate) as lab:
        place = Place(lab, 1, _FIRST_PORT)
        commands = [_command(task, place, folder, node, trials, seconds) for node in range(nodes)]
        run_commands(f"recommend over {rate}", commands, folder, lab, 3 * seconds + 120)
    made: dict[str, Any] = json.loads((folder / "node0.json").read_text())
    return made


def _command(
    task: str, place: Place, folder: Path, node: int, trials: int, seconds: float
) -> tuple[list[str], dict[str, str]]:
    flags = ["--ips", ",".join(place.addresses), "--node_ip", place.addresses[node], "--nproc", "1"]
    flags += ["--started_port", str(place.port), "--trials", str(trials), "--seconds", f"{seconds:g}", "--json"]
    flags += [word for risk in _RISKS for word in ("--allow", risk)]
    flags += ["--record", str(folder / f"runs{node}"), "--output", str(folder / f"node{node}.yaml")]
    command = [*place.lab.nodes[node].prefix, sys.executable, "-m", "fleet_train", "recommend", *flags]
    # JSON on stdout alone: the lines go into the job's log.
    shell = ["sh", "-c", '"$@" > "$0"', str(folder / f"node{node}.json"), *command, "--script", str(_SCRIPT), task]
    return shell, {}


def rows_of(rate: str, made: dict[str, Any]) -> list[Row]:
    return [
        Row(rate, one["name"], one["predicted_ms"], one["measured_ms"])
        for one in made["profiles"]
        if one["measured_ms"] is not None
    ]


def table(rows: Sequence[Row], picks: dict[str, str]) -> str:
    """Markdown: every row, then the errors, and how far each pick is from the best."""
    lines = ["| network | profile | predicted ms | measured ms | error |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {row.rate} | {row.name} | {row.predicted:.1f} | {row.measured:.1f} | {row.error:.0%} |" for row in rows
    ]
    errors = [row.error for row in rows]
    lines += ["", f"{len(rows)} steps: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}", ""]
    for rate, name in picks.items():
        measured = {row.name: row.measured for row in rows if row.rate == rate}
        best = min(measured, key=lambda one: measured[one])
        lines.append(f"{rate}: picked {name}, {measured[name] / measured[best]:.2f} of the best measured ({best})")
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--task", "task_name", type=click.Choice(sorted(TASKS)), default="mlp", help="What is trained.")
@click.option("--rate", "rates", multiple=True, default=("100mbit", "1gbit", "none"), help="A network; again for more.")
@click.option("--nodes", default=2, help="Emulated machines.")
@click.option("--trials", default=20, help="Profiles that are tried on each network.")
@click.option("--seconds", default=600.0, help="About how long one network may take.")
@click.option("--output", type=Path, default=Path("docs/benchmarks/prediction"), help="The record, without its ending.")
def main(task_name: str, rates: tuple[str, ...], nodes: int, trials: int, seconds: float, output: Path) -> None:
    """Try every profile on every network, and compare with what was predicted."""
    at = record.circumstances() | {"command": " ".join(["python", "tools/bench_prediction.py", *sys.argv[1:]])}
    made: dict[str, dict[str, Any]] = {}
    rows: list[Row] = []
    for rate in rates:
        with tempfile.TemporaryDirectory(prefix="bench_prediction_") as folder:
            made[rate] = recommendation(task_name, rate, nodes, trials, seconds, Path(folder))
        rows += rows_of(rate, made[rate])
        text = table(rows, {name: each["recommended"] for name, each in made.items() if each["recommended"]})
        output.with_suffix(".md").write_text(f"{text}\n")
        output.with_suffix(".json").write_text(json.dumps({"circumstances": at, "networks": made}, indent=1) + "\n")
    click.echo(f"{text}\n\nwritten: {output}.json, {output}.md")


if __name__ == "__main__":
    main()
