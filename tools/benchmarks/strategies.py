"""Communication strategies beside PyTorch, Horovod, stock Paddle and ranks that send nothing, on an emulated network.

    sudo .venv/bin/python tools/bench.py strategies --task bytes --quick
    sudo .venv/bin/python tools/bench.py strategies --task bytes --network 100mbit-20ms --record docs/benchmarks
    sudo .venv/bin/python tools/bench.py strategies --task resnet18 --ours my/profile.yaml --rivals torch:ddp

Trains the same network with every contestant, once per round in turn, and judges the trained parameters on data that
nobody trained on: at equal steps, at equal time, and by the time to the task's targets. The seeds of the rounds follow
from the commit that last changed anything that they run: nothing was chosen with their results in view. A turn beside
which other processes worked does not count, and is taken again when the command is given again. The record is written
after every turn. A record of that name is continued, up to --rounds, on the same processor and commit. Needs
requirements-bench.txt (PyTorch, torchft) and root (tools/lab.py); Horovod takes part where it is installed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from fleet_train.cluster.installed import git
from tools.benchmarks.contestants import (
    ALONE,
    CATALOGUE,
    HOROVOD,
    NOTHING,
    REFUSED,
    TORCHFT,
    Contestant,
    chosen_contestants,
)
from tools.benchmarks.jobs import ERROR, JobFailed, Place, run_contestant
from tools.benchmarks.networks import described
from tools.benchmarks.pictures import picture
from tools.benchmarks.ranks import Assignment
from tools.benchmarks.record import ROOT, RUN, Keep, circumstances, recorded
from tools.benchmarks.report import page, summarised
from tools.benchmarks.tasks import CLICKS, TASKS, Task, digest
from tools.lab import Lab, network_of

_PORTS_PER_JOB, _FIRST_PORT, _PORT_RANGE = 60, 6200, 24000
# A contestant that failed so often is left out of later rounds.
_FAILURES = 2
# A turn in which other processes take more of a processor does not count; it is taken so many times.
_QUIET, _TAKES = 0.1, 3
# Ranks that send nothing go on so many times as long; others that compute alone are there for their step times.
_TIMES_AS_LONG, _STEPS_ALONE = 2, 100


def of_others() -> float:
    """Seconds of processor time so far of what is not this process or has not been started by it."""
    user, nice, system, *_, steal = (int(each) for each in Path("/proc/stat").read_text().split()[1:9])
    mine = os.times()
    busy = (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
    return busy - (mine.user + mine.system + mine.children_user + mine.children_system)


def frozen_commit() -> str:
    """The last commit that changed what turns run."""
    return git(ROOT, "log", "-1", "--format=%H", "--", *RUN)


def seed_of(commit: str, number: int) -> int:
    """The seed of a round, of start weights, batches and data order."""
    return int(hashlib.sha256(f"{commit} {number}".encode()).hexdigest()[:8], 16)


@dataclass
class Benchmark:
    """What is measured; ``rounds``, ``failures`` and ``sittings`` (one per run of the command) grow while it runs."""

    task: Task
    chosen: list[Contestant]
    nodes: int
    ranks_per_node: int
    rate: str
    rtt: float
    repeats: int
    timeout_seconds: float
    frozen: str = field(default_factory=frozen_commit)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    sittings: list[dict[str, Any]] = field(default_factory=list)

    def run(self, at: Mapping[str, Any], keep: Callable[[], None]) -> None:
        """Every contestant once per round; ``keep`` writes the record after every turn. ``at``: circumstances."""
        self.sittings.append({**at, "load_average_after": None, "rounds": []})
        lab_of = Lab(self.nodes, self.rate, rtt=self.rtt)
        with lab_of as lab, tempfile.TemporaryDirectory(prefix="bench_strategies_") as folder:
            for turn, (number, contestant) in enumerate(tqdm(self.turns(), unit="turn", disable=None)):
                if not self.has_failed_often(contestant.name):
                    place = Place(lab, self.ranks_per_node, _FIRST_PORT + _PORTS_PER_JOB * turn % _PORT_RANGE)
                    with tempfile.TemporaryDirectory(dir=folder) as own:
                        self._take_turn(contestant, number, place, Path(own))
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
        missing = {number for number, each in self.turns() if not self.has_failed_often(each.name)}
        return sum(number not in missing for number in range(1, self.repeats + 1))

    def has_failed_often(self, name: str) -> bool:
        return len([each for each in self.failures if each["contestant"] == name]) >= _FAILURES

    def _take_turn(self, contestant: Contestant, number: int, place: Place, folder: Path) -> None:
        steps = self._steps_of(contestant)
        compared_at = self.task.steps if steps > self.task.steps else None
        seed = seed_of(self.frozen, number)
        task = dataclasses.replace(self.task, seed=seed, steps=steps, compared_at=compared_at)
        shape = (self.nodes, self.ranks_per_node, self.timeout_seconds)
        turn = {"contestant": contestant.name, "round": number, "seed": task.seed}
        for take in range(1, _TAKES + 1):
            own = dataclasses.replace(place, port=place.port + (take - 1) * _PORTS_PER_JOB // _TAKES)
            load, began, others = os.getloadavg()[0], time.monotonic(), of_others()
            try:
                found = run_contestant(Assignment(task, contestant, str(folder / str(take)), *shape), own)
            except JobFailed as failure:
                click.echo(f"round {number}: {failure}", err=True)
                self.failures.append(turn | {"reason": reason_of(str(failure)), "output": str(failure)[-2000:]})
                return
            seconds = time.monotonic() - began
            others = (of_others() - others) / seconds
            if others > _QUIET:
                click.echo(f"round {number}: {contestant.name}: others took {others:.2f} of a processor", err=True)
                continue
            told = {"seconds": round(seconds, 1), "load_average_before": round(load, 2), "others": round(others, 3)}
            self.rounds.append(turn | {"takes": take} | found | told)
            score = f"{found['evaluations'][-1][2]:.4f}" if found["evaluations"] else ""
            click.echo(
                f"round {number} of {self.repeats}  {contestant.name:<30} {found['step_ms']:7.1f} ms  "
                f"{found['sent_bytes'] / 1e3:9.1f} kB  {score}  {seconds:.0f} s{f', take {take}' if take > 1 else ''}"
            )
            return

    def _steps_of(self, contestant: Contestant) -> int:
        if contestant.kind != ALONE or self.task.score is None:
            return self.task.steps
        if contestant.name == NOTHING:
            return _TIMES_AS_LONG * self.task.steps
        return min(self.task.steps, _STEPS_ALONE)

    def settings(self) -> dict[str, Any]:
        """What all sittings of a record share."""
        task = {name: value for name, value in dataclasses.asdict(self.task).items() if name != "seed"}
        return {
            "lab": {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node, "rate": self.rate, "rtt": self.rtt},
            "task": task | {"network": described(self.task), "data": digest(self.task)},
            "contestants": [each.name for each in self.chosen],
            "frozen": self.frozen,
        }

    def record(self) -> dict[str, Any]:
        """``circumstances`` are those of the first sitting."""
        found = {
            "circumstances": self.sittings[0],
            "sittings": self.sittings,
            **self.settings(),
            "repeats": self.repeats,
            "whole_rounds": self.whole_rounds(),
            "failures": self.failures,
            "rounds": self.rounds,
        }
        return found | {"summary": summarised(found)}

    def write(self, keep: Keep) -> None:
        record = self.record()
        keep(record, page(record), picture(record) if keep.path else "")

    def go_on_from(self, record: Mapping[str, Any]) -> None:
        """Continue what `Keep.begun` gave."""
        self.rounds, self.failures = list(record["rounds"]), list(record["failures"])
        self.sittings = list(record["sittings"])


def reason_of(failure: str) -> str:
    """The first line, and the first of the output that names Python's error."""
    first, *lines = failure.splitlines()
    error = next((line.strip() for line in lines if ERROR.match(line)), "")
    return f"{first}: {error[:200]}" if error else first


@click.command(context_settings={"show_default": True})
@click.option("--task", "task_name", type=click.Choice(list(TASKS)), default="bytes", help="What is trained.")
@click.option("--ours", multiple=True, default=CATALOGUE, help="A profile or a file; repeat.")
@click.option("--rivals", default="default", help="default (all), none, or torch:ddp,torch:bf16,...")
@click.option("--nodes", default=2, help="Emulated machines.")
@click.option("--ranks_per_node", default=1, help="Processes on each.")
@click.option("--network", default="1gbit", help="Rate limit of a node, and a ping: 1gbit, 100mbit-20ms, unlimited.")
@click.option("--steps", type=int, help="Training steps per turn; default: the task's.")
@click.option("--timeout", default=900.0, help="Timeout of a turn in seconds.")
@click.option("--quick", is_flag=True, help="One round of few steps: a smoke test, not to be quoted.")
@recorded(8, "each runs every contestant once")
def main(
    task_name: str, ours: tuple[str, ...], rivals: str, network: str, steps: int | None, timeout: float, quick: bool,
    rounds: int, keep: Keep, **lab: Any,
) -> None:  # fmt: skip
    changes: dict[str, Any] = {"steps": 24, "warmup_steps": 4, "evaluate_every": 12} if quick else {}
    task = dataclasses.replace(TASKS[task_name], **changes | ({"steps": steps} if steps else {}))
    if task.steps <= task.warmup_steps:
        raise click.UsageError(f"--steps {task.steps}: the first {task.warmup_steps} are not timed; give more")
    try:
        chosen = _installed(chosen_contestants(ours, rivals, task.bucket, task_name == CLICKS))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    rate, rtt = network_of(network)
    repeats = 1 if quick else rounds
    benchmark = Benchmark(task, chosen, rate=rate, rtt=rtt, repeats=repeats, timeout_seconds=timeout, **lab)
    at = circumstances()
    nothing: dict[str, Any] = {"sittings": [], "rounds": [], "failures": []}
    benchmark.go_on_from(keep.begun({"circumstances": at, **benchmark.settings(), **nothing}))
    click.echo(f"{task.name}: {described(task)}; {len(chosen)} contestants, {benchmark.repeats} rounds")
    benchmark.run(at, lambda: benchmark.write(keep))
    click.echo("\n".join(page(benchmark.record())))
    if unexpected := [each for each in benchmark.failures if each["contestant"] != REFUSED]:
        raise click.ClickException(f"{len(unexpected)} turns failed, see above and the record")
    if left := [name for _, each in benchmark.turns() if not benchmark.has_failed_often(name := each.name)]:
        raise click.ClickException(f"{len(left)} turns are left: others worked beside them; give the command again")


def _installed(chosen: Sequence[Contestant]) -> list[Contestant]:
    """Those whose framework is there; without PyTorch, a click error."""
    if any(each.needs_torch for each in chosen) and importlib.util.find_spec("torch") is None:
        raise click.ClickException("torch is not installed: pip install -r requirements-bench.txt, or --rivals none")
    missing = [kind for kind in (HOROVOD, TORCHFT) if importlib.util.find_spec(kind) is None]
    for kind in missing:
        click.echo(f"{kind} is not installed: it does not take part", err=True)
    return [each for each in chosen if each.kind not in missing]
