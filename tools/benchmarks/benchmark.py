"""A running benchmark: rounds of turns in the lab, their results, and an estimate of the remaining time."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from fleet_train.cluster.installed import git
from fleet_train.errors import FleetTrainError
from fleet_train.plan.price import Link, Network
from tools.benchmarks import contestants
from tools.benchmarks.contestants import Contestant
from tools.benchmarks.figures import Summary, summarise
from tools.benchmarks.jobs import ROOT, JobFailed, Place, run_job
from tools.benchmarks.loop import Assignment
from tools.benchmarks.networks import describe
from tools.benchmarks.prediction import measure_links, predicted_step_ms
from tools.benchmarks.task import Task
from tools.lab import Lab

_PORTS_PER_JOB, _FIRST_PORT, _PORT_RANGE = 20, 6200, 20000
# A contestant that failed so often is left out of later rounds.
_FAILURES = 2


@dataclass
class Benchmark:
    """What is measured; ``rounds``, ``failures`` and ``sittings`` (one per run of the command) grow while it runs."""

    task: Task
    chosen: list[Contestant]
    nodes: int
    ranks_per_node: int
    rate: str
    repeats: int
    seeds: int
    target: float
    timeout_seconds: float
    start_iteration: int
    measure_seconds: float
    before: Path = ROOT
    network: Network | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    sittings: list[dict[str, Any]] = field(default_factory=list)

    def run(self, at: Mapping[str, Any], keep: Callable[[], None]) -> None:
        """Every contestant once per round; ``keep`` writes the record after every turn. ``at``: circumstances."""
        self.sittings.append({**at, "load_average_after": None, "rounds": []})
        with Lab(self.nodes, self.rate) as lab, tempfile.TemporaryDirectory(prefix="bench_strategies_") as folder:
            if self.network is None and self.measure_seconds and self._has_ours():
                place = Place(lab, self.ranks_per_node, _FIRST_PORT - _PORTS_PER_JOB)
                self._measure(place, Path(folder) / "links")
            for turn, (number, contestant) in enumerate(self.turns()):
                if self._has_failed_often(contestant.name):
                    continue
                port = _FIRST_PORT + _PORTS_PER_JOB * turn % _PORT_RANGE
                self._take_turn(contestant, number, Place(lab, self.ranks_per_node, port, self.before), folder)
                self._note_sitting(number)
                keep()
                click.echo(self.told_left())

    def turns(self) -> list[tuple[int, Contestant]]:
        """Round and contestant of every remaining turn."""
        taken = {(each["round"], each["contestant"]) for each in [*self.rounds, *self.failures]}
        turns = [(number, each) for number in range(1, self.repeats + 1) for each in self.chosen]
        return [(number, each) for number, each in turns if (number, each.name) not in taken]

    def seed(self, number: int) -> int:
        """The seed of initial weights and data order in a round: rounds cycle through the seeds."""
        return (number - 1) % self.seeds

    def whole_rounds(self) -> int:
        """The number of rounds in which every contestant has finished or failed."""
        missing = {number for number, each in self.turns() if not self._has_failed_often(each.name)}
        return sum(number not in missing for number in range(1, self.repeats + 1))

    def told_left(self) -> str:
        """A line for the terminal, estimated from the turns so far."""
        left = [each.name for _, each in self.turns() if not self._has_failed_often(each.name)]
        seconds = seconds_left(left, [(each["contestant"], each["seconds"]) for each in self.rounds])
        if not left:
            return "  nothing left"
        if seconds is None:
            return f"  {len(left)} turns left; the remaining time is known after the first round"
        return f"  {len(left)} turns left, about {seconds / 60:.0f} min by their earlier turns"

    def _has_ours(self) -> bool:
        return any(each.kind == contestants.OURS for each in self.chosen)

    def _has_failed_often(self, name: str) -> bool:
        return len([each for each in self.failures if each["contestant"] == name]) >= _FAILURES

    def _measure(self, place: Place, folder: Path) -> None:
        try:
            self.network = measure_links(place, folder, self.measure_seconds, self.timeout_seconds)
        except JobFailed as failure:
            click.echo(f"the links were not measured, no step is predicted: {failure}", err=True)

    def _take_turn(self, contestant: Contestant, number: int, place: Place, folder: str) -> None:
        task = dataclasses.replace(self.task, seed=self.seed(number))
        own = Path(folder) / f"round{number}-{self.chosen.index(contestant)}"
        assignment = Assignment(
            task, contestant.name, str(own), self.nodes, self.ranks_per_node, self.timeout_seconds,
            self.start_iteration,
        )  # fmt: skip
        turn = {"contestant": contestant.name, "round": number, "seed": task.seed}
        load, began = os.getloadavg()[0], time.monotonic()
        try:
            ranks = run_job(contestant, assignment, place)
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

    def _note_sitting(self, number: int) -> None:
        sitting = self.sittings[-1]
        sitting["rounds"] = sorted({*sitting["rounds"], number})
        sitting["load_average_after"] = [round(load, 2) for load in os.getloadavg()]

    def _summary(self, ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> Summary:
        return summarise(ranks, self.task.warmup_steps, self.ranks_per_node, self.target)

    def summaries(self) -> dict[str, Summary]:
        """Figures of all contestants that have finished a turn, in their order."""
        found: dict[str, Summary] = {}
        for name in (each.name for each in self.chosen):
            mine = {each["round"]: each["ranks"] for each in self.rounds if each["contestant"] == name}
            if mine:
                found[name] = self._summary(mine)
        return found

    def predictions(self, summaries: Mapping[str, Summary]) -> dict[str, float]:
        """Predicted milliseconds of a step of our contestants; empty if the links were not measured."""
        found: dict[str, float] = {}
        for each in self.chosen:
            baseline = summaries.get(each.baseline)
            if each.kind != contestants.OURS or each.name not in summaries or baseline is None or self.network is None:
                continue
            facts = next(row["ranks"][0]["facts"] for row in self.rounds if row["contestant"] == each.name)
            try:
                milliseconds = predicted_step_ms(
                    each.variant, facts, self.nodes, self.ranks_per_node, self.network, baseline.step_ms
                )
            except (FleetTrainError, ValueError) as error:
                click.echo(f"{each.name}: no predicted step: {error}", err=True)
                continue
            if milliseconds is not None:
                found[each.name] = milliseconds
        return found

    def record(self) -> dict[str, Any]:
        """Everything except the figures. ``circumstances`` are those of the first sitting."""
        return {
            "circumstances": self.sittings[0],
            "sittings": self.sittings,
            "lab": {
                "nodes": self.nodes,
                "ranks_per_node": self.ranks_per_node,
                "rate": self.rate,
                "link": self._link(),
            },
            "task": dataclasses.asdict(self.task) | {"description": describe(self.task)},
            "contestants": [each.name for each in self.chosen],
            "target": self.target,
            "repeats": self.repeats,
            "whole_rounds": self.whole_rounds(),
            "seeds": self.seeds,
            "start_iteration_of_hooks": self.start_iteration,
            "before_commit": self.before_commit(),
            "failures": self.failures,
            "rounds": self.rounds,
        }

    def go_on_from(self, record: Mapping[str, Any]) -> None:
        """Continue a record. Raises ValueError if its turns are not comparable with those to come."""
        mine = self.record_key()
        theirs = {key: record.get(key) for key in mine} | {"lab": _without_link(record["lab"])}
        differing = [key for key in mine if mine[key] != theirs[key]]
        if differing:
            told = "; ".join(f"{key}: {theirs[key]} there, {mine[key]} now" for key in differing)
            raise ValueError(f"the record has other settings ({told}); give the same ones, or another --output")
        link = record["lab"]["link"]
        if link:
            between = Link(link["latency_us"] / 1e6, link["bandwidth_mbps"] * 1e6 / 8)
            self.network = Network(between, Link(0.0, 1e12))
        self.rounds, self.failures = list(record["rounds"]), list(record["failures"])
        self.sittings = list(record["sittings"])

    def record_key(self) -> dict[str, Any]:
        """The settings that all sittings of a record share."""
        settings: dict[str, Any] = {
            "lab": {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node, "rate": self.rate},
            "task": dataclasses.asdict(self.task) | {"description": describe(self.task)},
            "contestants": [each.name for each in self.chosen],
            "target": self.target,
            "start_iteration_of_hooks": self.start_iteration,
            "before_commit": self.before_commit(),
        }
        return settings

    def before_commit(self) -> str | None:
        """Commit and changes of the other checkout, if one takes part."""
        return None if self.before == ROOT else git(self.before, "rev-parse", "HEAD")

    def _link(self) -> dict[str, float] | None:
        if self.network is None:
            return None
        between = self.network.between
        return {"latency_us": between.latency_seconds * 1e6, "bandwidth_mbps": between.bytes_per_second * 8 / 1e6}


def _without_link(lab: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in lab.items() if key != "link"}


def seconds_left(left: Sequence[str], taken: Sequence[tuple[str, float]]) -> float | None:
    """Estimated seconds of the turns of ``left``, each by the mean of its earlier ones; None if one had none."""
    total = 0.0
    for name in left:
        own = [seconds for other, seconds in taken if other == name]
        if not own:
            return None
        total += fmean(own)
    return total
