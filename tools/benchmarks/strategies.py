"""Communication strategies beside PyTorch DDP on an emulated network: step times, bytes, time to an accuracy.

    sudo python tools/bench.py strategies --quick
    sudo python tools/bench.py strategies --ours multi_node --ours my/profile.yaml --record records
    sudo python tools/bench.py strategies --task resnet18 --network 100mbit --ours powersgd --rivals torch:ddp

Trains the same network with every contestant, once per round in turn; round 1 has seed 0, round 2 seed 1, ... The
record is written after every turn. A record of that name is continued, up to --rounds, on the same processor and code.
Needs requirements-bench.txt (CPU PyTorch) and root (tools/lab.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from fleet_train.errors import FleetTrainError
from fleet_train.profile import Profile, load_profile
from tools.benchmarks.jobs import JobFailed, Place, checkout_of, revision_of, run_contestant
from tools.benchmarks.ranks import Assignment
from tools.benchmarks.record import ROOT, Keep, beside, circumstances, recorded, same_code
from tools.benchmarks.report import PICTURE, Summary, page, picture, rows_of, summarise
from tools.benchmarks.tasks import BEFORE, OURS, TASKS, TORCH, Contestant, Task, describe, with_baselines
from tools.lab import Lab

_PORTS_PER_JOB, _FIRST_PORT, _PORT_RANGE = 20, 6200, 20000
# A contestant that failed so often is left out of later rounds.
_FAILURES = 2
# Plain steps before PyTorch's hooks, unless their names give the number.
_START_ITERATION = 10
_OWN = "tools/benchmarks/profiles"
# The catalogue's strategies, unchanged: a new profile takes part once its name is here, with its twin (rivals_of).
CATALOGUE = """
multi_node bf16_compression int8_compression int4_compression powersgd ethernet_1g local_sgd diloco streaming_diloco
""".split()
# The same strategies with knobs chosen for such short runs, on both sides.
TUNED = "three_communicators bf16_small_buckets powersgd_1 local_sgd_8 diloco_8".split()
_LOW = "local_sgd_overlap local_sgd_overlap_float32 diloco_overlap".split()
SCENARIOS: dict[str, dict[str, Any]] = {
    # Every kind of strategy as shipped, beside its rival: step times, bytes, time to a target accuracy.
    "strategies": {"ours": CATALOGUE},
    # The same with tuned files beside the catalogue's, marked as such, and tuned rivals.
    "tuned": {"ours": [*CATALOGUE, *(f"{_OWN}/{name}.yaml" for name in TUNED)]},
    # Scaling efficiency of low-frequency strategies on two machines, and their cost in accuracy.
    "scaling": {
        "ours": "multi_node local_sgd diloco streaming_diloco".split() + [f"{_OWN}/{name}.yaml" for name in _LOW],
        "steps": 400,
        "evaluate_every": 16,
    },
    # Bytes between nodes: flat beside reduce inside the node, allreduce between leaders, broadcast inside.
    "hierarchical": {"ranks_per_node": 2, "ours": ["multi_node", "hierarchical"], "rivals": "none", "steps": 64},
}


def rivals_of(profiles: Sequence[Profile]) -> list[str]:
    """PyTorch's contestants for these, with the same tuning effort: DDP and its bfloat16 hook in two bucket sizes, and
    PowerSGD and post-local SGD of our rank or period that begin where ours begin."""
    twins = []
    for each in profiles:
        if each.use_local_sgd and each.outer_optimizer == "none":
            twins.append(f"torch:post_local_sgd_{each.local_sgd_steps}_from_{each.local_sgd_is_warm_steps}")
        elif each.compression == "powersgd" and not each.use_local_sgd:
            twins.append(f"torch:powersgd_{each.powersgd_rank}_from_{each.powersgd_start_step}")
    return list(dict.fromkeys(["torch:ddp", "torch:ddp_4mb", "torch:bf16", "torch:bf16_4mb", *twins]))


def chosen_contestants(ours: Sequence[str], rivals: str, has_before: bool = False) -> list[Contestant]:
    """The contestants that the flags name, after compute-only runs; a click error for an unknown name."""
    try:
        profiles = [load_profile(name) for name in ours]
        kinds = (OURS, BEFORE) if has_before else (OURS,)
        words = [f"{kind}:{name}" for name in ours for kind in kinds]
        listed = [] if rivals == "none" else rivals.split(",")
        return with_baselines(words + (rivals_of(profiles) if rivals == "default" else listed))
    except (ValueError, FleetTrainError) as error:
        raise click.UsageError(str(error)) from None


@dataclass
class Benchmark:
    """What is measured; ``rounds``, ``failures`` and ``sittings`` (one per run of the command) grow while it runs."""

    task: Task
    chosen: list[Contestant]
    nodes: int
    ranks_per_node: int
    rate: str
    repeats: int
    timeout_seconds: float
    before: Path = ROOT
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    sittings: list[dict[str, Any]] = field(default_factory=list)

    def run(self, at: Mapping[str, Any], keep: Callable[[], None]) -> None:
        """Every contestant once per round; ``keep`` writes the record after every turn. ``at``: circumstances."""
        self.sittings.append({**at, "load_average_after": None, "rounds": []})
        with Lab(self.nodes, self.rate) as lab, tempfile.TemporaryDirectory(prefix="bench_strategies_") as folder:
            for turn, (number, contestant) in enumerate(tqdm(self.turns(), unit="turn", disable=None)):
                if not self._has_failed_often(contestant.name):
                    port = _FIRST_PORT + _PORTS_PER_JOB * turn % _PORT_RANGE
                    place = Place(lab, self.ranks_per_node, port, self.before)
                    self._take_turn(contestant, number, place, Path(folder) / f"turn{turn}")
                    sitting = self.sittings[-1]
                    sitting["rounds"] = sorted({*sitting["rounds"], number})
                    sitting["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
                    keep()

    def turns(self) -> list[tuple[int, Contestant]]:
        """Round and contestant of every remaining turn."""
        taken = {(each["round"], each["contestant"]) for each in [*self.rounds, *self.failures]}
        turns = [(number, each) for number in range(1, self.repeats + 1) for each in self.chosen]
        return [(number, each) for number, each in turns if (number, each.name) not in taken]

    def whole_rounds(self) -> int:
        """The number of rounds in which every contestant has finished or failed."""
        missing = {number for number, each in self.turns() if not self._has_failed_often(each.name)}
        return sum(number not in missing for number in range(1, self.repeats + 1))

    def _has_failed_often(self, name: str) -> bool:
        return len([each for each in self.failures if each["contestant"] == name]) >= _FAILURES

    def _take_turn(self, contestant: Contestant, number: int, place: Place, folder: Path) -> None:
        task = dataclasses.replace(self.task, seed=number - 1)
        assignment = Assignment(
            task, contestant.name, str(folder), self.nodes, self.ranks_per_node, self.timeout_seconds, _START_ITERATION
        )
        turn = {"contestant": contestant.name, "round": number, "seed": task.seed}
        load, began = os.getloadavg()[0], time.monotonic()
        try:
            ranks = run_contestant(contestant, assignment, place)
        except JobFailed as failure:
            click.echo(f"round {number}: {failure}", err=True)
            self.failures.append(turn | {"reason": str(failure).splitlines()[0], "output": str(failure)[-2000:]})
            return
        took = {"seconds": round(time.monotonic() - began, 1), "load_average_before": round(load, 2)}
        self.rounds.append(turn | took | {"ranks": ranks})
        summary = self._summary({number: ranks})
        click.echo(
            f"round {number} of {self.repeats}  {contestant.name:<28} {summary.step_ms:7.1f} ms  "
            f"{summary.interface_bytes / 1e3:9.1f} kB  accuracy {summary.accuracy:.4f}  {took['seconds']:.0f} s"
        )

    def _summary(self, ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> Summary:
        return summarise(ranks, self.task.warmup_steps, self.ranks_per_node, self.task.target)

    def summaries(self) -> dict[str, Summary]:
        """Figures of all contestants that have finished a turn, in their order."""
        found: dict[str, Summary] = {}
        for name in (each.name for each in self.chosen):
            mine = {each["round"]: each["ranks"] for each in self.rounds if each["contestant"] == name}
            if mine:
                found[name] = self._summary(mine)
        return found

    def settings(self) -> dict[str, Any]:
        """What all sittings of a record share."""
        return {
            "lab": {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node, "rate": self.rate},
            "task": dataclasses.asdict(self.task) | {"description": describe(self.task)},
            "contestants": [each.name for each in self.chosen],
            "target": self.task.target,
            "start_iteration_of_hooks": _START_ITERATION,
            "before_commit": None if self.before == ROOT else revision_of(self.before),
        }

    def record(self) -> dict[str, Any]:
        """``circumstances`` are those of the first sitting."""
        rows = rows_of(self.summaries(), self.rate)
        return {
            "circumstances": self.sittings[0],
            "sittings": self.sittings,
            **self.settings(),
            "repeats": self.repeats,
            "whole_rounds": self.whole_rounds(),
            "failures": self.failures,
            "summary": {name: dataclasses.asdict(each) | rows[name] for name, each in self.summaries().items()},
            "rounds": self.rounds,
        }

    def write(self, keep: Keep) -> None:
        record, summaries = self.record(), self.summaries()
        keep(record, page(record, summaries), picture(summaries), PICTURE)

    def go_on_from(self, record: Mapping[str, Any], at: Mapping[str, Any]) -> None:
        """Continue a record. Raises ValueError if its turns are not comparable with those to come."""
        then, mine = record["circumstances"], json.loads(json.dumps(self.settings()))
        differing = [f"{key}: {record.get(key)} there, {mine[key]} now" for key in mine if record.get(key) != mine[key]]
        if then["processor"] != at["processor"]:
            differing.append(f"processor: {then['processor']} there, {at['processor']} now")
        if not same_code(then["commit"], at["commit"]):
            differing.append(f"fleet_train, tools or strategies have changed since its commit {then['commit'][:10]}")
        if differing:
            raise ValueError(f"its rounds have to be comparable ({'; '.join(differing)}); give another --name")
        self.rounds, self.failures = list(record["rounds"]), list(record["failures"])
        self.sittings = list(record["sittings"])


def _scenario(ctx: click.Context, option: click.Parameter, name: str | None) -> str | None:
    """A scenario's flags become the defaults of the others."""
    del option
    if name is not None:
        ctx.default_map = SCENARIOS[name]
    return name


@click.command(context_settings={"show_default": True})
@click.option(
    "--scenario", type=click.Choice(sorted(SCENARIOS)), is_eager=True, expose_value=False, callback=_scenario,
    help="A named set of flags; other flags override it.",
)  # fmt: skip
@click.option("--ours", multiple=True, default=CATALOGUE, help="A profile of strategies/ or a YAML file; repeat.")
@click.option("--rivals", default="default", help="default (the corresponding ones), none, or torch:ddp,torch:bf16,...")
@click.option("--before", help="Another checkout, or a commit: each of ours also runs with the package there.")
@click.option("--task", "task_name", type=click.Choice(sorted(TASKS)), default="mlp", help="What is trained.")
@click.option("--nodes", default=2, help="Emulated machines.")
@click.option("--ranks_per_node", default=1, help="Processes on each.")
@click.option("--network", "rate", default="1gbit", help="Rate limit of a node: 1gbit, 100mbit, or unlimited.")
@click.option("--steps", type=int, help="Training steps per turn; default: the task's.")
@click.option("--evaluate_every", type=int, help="Steps between two evaluations; default: the task's.")
@click.option("--timeout", default=900.0, help="Timeout of a turn in seconds.")
@click.option("--quick", is_flag=True, help="One round of few steps: a smoke test, not to be quoted.")
@recorded(3, "each runs every contestant once")
def main(
    ours: tuple[str, ...], rivals: str, before: str | None, task_name: str, rate: str, steps: int | None,
    evaluate_every: int | None, timeout: float, quick: bool, rounds: int, keep: Keep, **lab: Any,
) -> None:  # fmt: skip
    changes: dict[str, Any] = {"steps": 24, "warmup_steps": 4, "evaluate_every": 12} if quick else {}
    changes |= {name: value for name, value in (("steps", steps), ("evaluate_every", evaluate_every)) if value}
    task = dataclasses.replace(TASKS[task_name], **changes)
    if task.steps <= task.warmup_steps:
        raise click.UsageError(f"--steps {task.steps}: the first {task.warmup_steps} are not timed; give more")
    chosen = chosen_contestants(ours, rivals, bool(before))
    if any(each.framework == TORCH for each in chosen) and importlib.util.find_spec("torch") is None:
        raise click.ClickException("torch is not installed: pip install -r requirements-bench.txt, or --rivals none")
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(checkout_of(before)) if before else ROOT
        rate = {"unlimited": "none"}.get(rate, rate)
        benchmark = Benchmark(task, chosen, rate=rate, repeats=1 if quick else rounds, timeout_seconds=timeout,
                              before=there, **lab)  # fmt: skip
        at = circumstances()
        if keep.path is not None and beside(keep.path, ".json").exists():
            try:
                benchmark.go_on_from(json.loads(beside(keep.path, ".json").read_text()), at)
            except ValueError as error:
                raise click.UsageError(f"{keep.path}.json is there: {error}") from None
        click.echo(f"{describe(task)}\n{len(chosen)} contestants, {benchmark.repeats} rounds")
        benchmark.run(at, lambda: benchmark.write(keep))
    click.echo("\n".join(page(benchmark.record(), benchmark.summaries())))
    if benchmark.failures:
        raise click.ClickException(f"{len(benchmark.failures)} turns failed, see above and the record")
