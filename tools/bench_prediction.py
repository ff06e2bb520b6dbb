"""Predicted and measured steps: `recommend` with trials of every profile, on emulated networks, in one table.

    sudo python tools/bench_prediction.py --rounds 3 --output docs/benchmarks/DATE-prediction

Each network is a lab (tools/lab.py, root) of two machines, the task one of the benchmarks'. For each network, the
record has every profile's predicted and measured step, the recommended profile, and the one with the shortest step.
A round is one `recommend` on each network; the table has medians over the rounds, and is written after each network.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from tools.benchmarks import record
from tools.benchmarks.jobs import ROOT, Place, run_commands
from tools.benchmarks.task import TASKS
from tools.lab import Lab

_FIRST_PORT = 6400
_SCRIPT = ROOT / "tools" / "examples" / "task_of_the_benchmark.py"
_BY_DEFAULT = 4
"""The default number of trials of `recommend`."""
_RISKS = ("rounding", "lossy", "local_steps")


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
    # Only JSON on stdout: other lines go to the job's log.
    shell = ["sh", "-c", '"$@" > "$0"', str(folder / f"node{node}.json"), *command, "--script", str(_SCRIPT), task]
    return shell, {}


def rows_of(rate: str, rounds: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows of what most rounds tried: rounds differ in which changes of a profile's knobs they predict to help."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for made in rounds:
        for one in made["profiles"]:
            if one["measured_ms"] is not None:
                pairs[one["name"]].append((one["predicted_ms"], one["measured_ms"]))
    columns = {name: list(zip(*found, strict=True)) for name, found in pairs.items() if 2 * len(found) > len(rounds)}
    return [Row(rate, name, tuple(predicted), tuple(measured)) for name, (predicted, measured) in columns.items()]


def table(networks: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Markdown: every row, then the errors, and how far each recommendation is from the best of its round."""
    rows = [row for rate, rounds in networks.items() for row in rows_of(rate, rounds)]
    lines = [
        "| network | profile | predicted ms | measured ms | error | rounds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.rate} | {row.name} | {_range(row.predicted)} | {_range(row.measured)} | {row.error:.0%} "
        f"| {len(row.measured)} |"
        for row in rows
    ]
    errors = [row.error for row in rows]
    lines += ["", f"{len(rows)} steps: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}", ""]
    lines += [_pick(rate, made) for rate, rounds in networks.items() for made in rounds]
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.1f}"
    return f"{middle} ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else middle


def _pick(rate: str, made: dict[str, Any]) -> str:
    tried = sorted((one for one in made["profiles"] if one["measured_ms"] is not None), key=_predicted)
    pick, best = (min(some, key=_measured) for some in (tried[:_BY_DEFAULT], tried))
    return (
        f"- {rate}: with the default of {_BY_DEFAULT} trials it picks {pick['name']}, "
        f"{_measured(pick) / _measured(best):.2f} of the best measured ({best['name']})"
    )


def _predicted(one: Mapping[str, Any]) -> float:
    return float(one["predicted_ms"])


def _measured(one: Mapping[str, Any]) -> float:
    return float(one["measured_ms"])


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--task", "task_name", type=click.Choice(sorted(TASKS)), default="mlp", help="What is trained.")
@click.option(
    "--rate", "rates", multiple=True, default=("100mbit", "1gbit", "none"), help="A network's rate; repeat for more."
)
@click.option("--nodes", default=2, help="Emulated machines.")
@click.option("--trials", default=20, help="Number of profiles tried on each network.")
@click.option("--seconds", default=600.0, help="Approximate time limit of one network.")
@click.option("--rounds", default=1, help="Rounds; each measures every network once. The table has medians.")
@click.option("--output", type=Path, default=Path("docs/benchmarks/prediction"), help="The record, without its ending.")
def main(
    task_name: str, rates: tuple[str, ...], nodes: int, trials: int, seconds: float, rounds: int, output: Path
) -> None:
    """Try every profile on every network, and compare with what was predicted."""
    at = record.circumstances() | {"command": " ".join(["python", "tools/bench_prediction.py", *sys.argv[1:]])}
    made: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, rate in ((number, rate) for number in range(1, rounds + 1) for rate in rates):
        with tempfile.TemporaryDirectory(prefix="bench_prediction_") as folder:
            made[rate].append(recommendation(task_name, rate, nodes, trials, seconds, Path(folder)))
        record.beside(output, ".md").write_text(_page(task_name, at, made))
        content = {"circumstances": at, "task": task_name, "networks": made}
        record.beside(output, ".json").write_text(json.dumps(content, indent=1) + "\n")
        click.echo(f"round {number} of {rounds}, {rate}: written: {output}.json, {output}.md")
    click.echo(table(made))


def _page(task: str, at: Mapping[str, Any], made: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    lines = [
        f"# Predicted and measured steps, {task}, two machines",
        "",
        *record.told_circumstances(at, "CPU and Gloo, an emulated network"),
        "- *predicted*: by `recommend`, before its trials, from what it had measured; *measured*: its trials of a few "
        "dozen steps. Medians over the rounds, with the smallest and largest.",
        "",
        table(made),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
