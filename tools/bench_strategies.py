"""Communication strategies against PyTorch DDP and stock Paddle on an emulated network; docs/benchmarks/ has records.

    sudo python tools/bench_strategies.py --quick
    sudo python tools/bench_strategies.py --rounds 5 --ours multi_node --ours powersgd --ours my/profile.yaml
    sudo python tools/bench_strategies.py --scenario small_tensors --rounds 5

Needs requirements-bench.txt (CPU PyTorch) and root (tools/lab.py).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from fleet_train.errors import FleetTrainError
from fleet_train.plan.predict import Network
from fleet_train.profile import load_profile
from tools.benchmarks import contestants, record
from tools.benchmarks.contestants import Contestant
from tools.benchmarks.figures import Summary, summarise
from tools.benchmarks.jobs import ROOT, JobFailed, Place, run_job
from tools.benchmarks.loop import Assignment
from tools.benchmarks.prediction import measure_links, predicted_step_ms
from tools.benchmarks.report import table
from tools.benchmarks.scenarios import SCENARIOS
from tools.benchmarks.task import TASKS, Task
from tools.lab import Lab

_QUICK = {"steps": 48, "warmup_steps": 16}
_PORTS_PER_JOB, _FIRST_PORT = 20, 6200


@dataclass
class Benchmark:
    """What is measured; ``rounds`` and ``failures`` grow while it runs."""

    task: Task
    chosen: list[Contestant]
    nodes: int
    ranks_per_node: int
    rate: str
    repeats: int
    target: float
    timeout_seconds: float
    start_iteration: int
    measure_seconds: float
    before: Path
    network: Network | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Every contestant once per round, in turn. Who fails once takes no part in later rounds."""
        with Lab(self.nodes, self.rate) as lab, tempfile.TemporaryDirectory(prefix="bench_strategies_") as folder:
            if self.measure_seconds and any(each.kind == contestants.OURS for each in self.chosen):
                place = Place(lab, self.ranks_per_node, _FIRST_PORT - _PORTS_PER_JOB)
                self.network = measure_links(place, Path(folder) / "links", self.measure_seconds, self.timeout_seconds)
            turns = [(number, each) for number in range(self.repeats) for each in self.chosen]
            for turn, (number, contestant) in enumerate(turns):
                if any(failure["contestant"] == contestant.name for failure in self.failures):
                    continue
                place = Place(lab, self.ranks_per_node, _FIRST_PORT + _PORTS_PER_JOB * turn, self.before)
                self._take_turn(contestant, number, place, Path(folder) / f"turn{turn}")

    def _take_turn(self, contestant: Contestant, number: int, place: Place, folder: Path) -> None:
        assignment = Assignment(
            self.task, contestant.name, str(folder), self.nodes, self.ranks_per_node, self.timeout_seconds,
            self.start_iteration,
        )  # fmt: skip
        try:
            ranks = run_job(contestant, assignment, place)
        except JobFailed as failure:
            click.echo(f"round {number + 1}: {failure}", err=True)
            reason = str(failure).splitlines()[0]
            self.failures.append({"contestant": contestant.name, "round": number + 1, "reason": reason})
            return
        self.rounds.append({"contestant": contestant.name, "round": number + 1, "ranks": ranks})
        summary = summarise([ranks], self.task.warmup_steps, self.ranks_per_node, self.target)
        click.echo(
            f"round {number + 1} of {self.repeats}  {contestant.name:<28} {summary.step_ms:7.1f} ms  "
            f"{summary.interface_bytes / 1e3:9.1f} kB  accuracy {summary.accuracy:.4f}"
        )

    def summaries(self) -> dict[str, Summary]:
        """Of everybody who finished every round, in the order of the contestants."""
        found: dict[str, Summary] = {}
        for name in (each.name for each in self.chosen):
            mine = [each["ranks"] for each in self.rounds if each["contestant"] == name]
            if len(mine) == self.repeats:
                found[name] = summarise(mine, self.task.warmup_steps, self.ranks_per_node, self.target)
        return found

    def predictions(self, summaries: Mapping[str, Summary]) -> dict[str, float]:
        """Milliseconds of a step by the plan, for ours; nothing where the links were not measured."""
        found: dict[str, float] = {}
        for each in self.chosen:
            baseline = summaries.get(each.baseline)
            if each.kind != contestants.OURS or each.name not in summaries or baseline is None or self.network is None:
                continue
            facts = next(row["ranks"][0]["facts"] for row in self.rounds if row["contestant"] == each.name)
            milliseconds = predicted_step_ms(
                each.variant, facts, self.nodes, self.ranks_per_node, self.network, baseline.step_ms
            )
            if milliseconds is not None:
                found[each.name] = milliseconds
        return found

    def record(self, at: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "circumstances": at,
            "lab": {
                "nodes": self.nodes,
                "ranks_per_node": self.ranks_per_node,
                "rate": self.rate,
                "link": self._link(),
            },
            "task": dataclasses.asdict(self.task) | {"description": self.task.describe()},
            "target": self.target,
            "repeats": self.repeats,
            "start_iteration_of_hooks": self.start_iteration,
            "failures": self.failures,
            "rounds": self.rounds,
        }

    def _link(self) -> dict[str, float] | None:
        if self.network is None:
            return None
        between = self.network.between
        return {"latency_us": between.latency_seconds * 1e6, "bandwidth_mbps": between.bytes_per_second * 8 / 1e6}


def chosen_contestants(
    ours: Sequence[str], rivals: str, explicit: Sequence[str], has_before: bool = False
) -> list[Contestant]:
    """What the flags name, with compute-only runs in front; click's error for a name that nobody knows."""
    words = list(explicit)
    if not words:
        defaults = [contestants.parse(word) for word in contestants.DEFAULT]
        profiles = ours or [each.variant for each in defaults if each.kind == contestants.OURS]
        words = [f"ours:{name}" for name in profiles]
        if rivals == "default":
            words += [each.name for each in defaults if each.kind != contestants.OURS]
        elif rivals != "none":
            words += rivals.split(",")
    if has_before:
        words = contestants.beside_before(words)
    try:
        chosen = [contestants.parse(word) for word in words]
        for each in chosen:
            if each.kind == contestants.OURS:
                load_profile(each.variant)
    except (ValueError, FleetTrainError) as error:
        raise click.UsageError(str(error)) from None
    return contestants.with_baselines(chosen)


def _scenario(ctx: click.Context, option: click.Parameter, name: str | None) -> str | None:
    """Its words become the defaults of the other flags."""
    del option
    if name is not None:
        ctx.default_map = SCENARIOS[name]
    return name


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--scenario",
    type=click.Choice(sorted(SCENARIOS)),
    is_eager=True,
    expose_value=False,
    callback=_scenario,
    help="Who takes part in which task, by one word; other flags win over it.",
)
@click.option("--ours", multiple=True, help="A profile of strategies/ or a YAML file; again for more.")
@click.option("--rivals", default="default", help="default, none, or words such as torch:ddp,torch:powersgd_2.")
@click.option("--contestant", "explicit", multiple=True, help="Exactly these, such as ours:multi_node, torch:ddp.")
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Another checkout of this project: each of ours also takes its turn with the package that is there.",
)
@click.option("--task", "task_name", type=click.Choice(sorted(TASKS)), default="digits_3m", help="What is trained.")
@click.option("--nodes", default=2, help="Emulated machines.")
@click.option("--ranks_per_node", default=1, help="Processes on each.")
@click.option("--rate", default="1gbit", help="What a node may send, as tc spells it.")
@click.option("--rounds", "repeats", default=3, help="How often every contestant has its turn.")
@click.option("--steps", type=int, help="Training steps per turn; default: the task's.")
@click.option("--evaluate_every", type=int, help="Steps between two evaluations; default: the task's.")
@click.option("--target", default=0.95, help="Test accuracy whose time is measured.")
@click.option("--start_iteration", default=10, help="Plain steps before PyTorch's PowerSGD and post-local SGD begin.")
@click.option("--measure_seconds", default=8.0, help="How long to measure the links first; 0 predicts no step times.")
@click.option("--timeout", default=300.0, help="Seconds that a turn may take.")
@click.option("--quick", is_flag=True, help="One round of few steps: to see that it works, not to quote.")
@click.option("--output", default="docs/benchmarks/strategies", help="The record, without its ending.")
def main(
    ours: tuple[str, ...], rivals: str, explicit: tuple[str, ...], task_name: str, steps: int | None, quick: bool,
    evaluate_every: int | None, output: str, before: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Train the same network with every contestant in turn, and write down what it cost."""
    changes: dict[str, Any] = (_QUICK if quick else {}) | ({"steps": steps} if steps else {})
    changes |= {"evaluate_every": evaluate_every} if evaluate_every else {}
    task = dataclasses.replace(TASKS[task_name], **changes)
    if task.steps <= task.warmup_steps:
        raise click.UsageError(f"--steps {task.steps}: the first {task.warmup_steps} are not timed; give more")
    options["repeats"] = 1 if quick else options["repeats"]
    chosen = chosen_contestants(ours, rivals, explicit, has_before=before is not None)
    _require("matplotlib", *("torch" for each in chosen if each.framework == contestants.TORCH))
    at = record.circumstances()
    benchmark = Benchmark(task, chosen, timeout_seconds=options.pop("timeout"), before=before or ROOT, **options)
    click.echo(f"{task.describe()}\n{len(chosen)} contestants, {benchmark.repeats} rounds\n")
    benchmark.run()
    summaries = benchmark.summaries()
    predictions = benchmark.predictions(summaries)
    record.write(Path(output), benchmark.record(at), summaries, predictions)
    _draw(Path(output), benchmark, summaries)
    click.echo(f"\n{table(summaries, benchmark.rate, predictions)}\n\nwritten: {output}.json, .md, .png")
    if benchmark.failures:
        raise click.ClickException(f"{len(benchmark.failures)} contestants failed, see above and the record")


def _require(*modules: str) -> None:
    missing = sorted({module for module in modules if importlib.util.find_spec(module) is None})
    if missing:
        raise click.ClickException(f"not installed: {', '.join(missing)}; pip install -r requirements-bench.txt")


def _draw(path: Path, benchmark: Benchmark, summaries: Mapping[str, Summary]) -> None:
    from tools.benchmarks.plot import draw  # matplotlib is slow to import and only needed here

    draw(path.with_suffix(".png"), benchmark.rounds, summaries, benchmark.target)


if __name__ == "__main__":
    main()
