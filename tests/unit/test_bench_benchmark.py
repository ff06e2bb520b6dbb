"""A running benchmark with simulated ranks: what is kept, printed, retried and continued."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tools import bench_strategies
from tools.benchmarks import benchmark as module
from tools.benchmarks import record
from tools.benchmarks.benchmark import Benchmark, seconds_left
from tools.benchmarks.contestants import parse
from tools.benchmarks.jobs import JobFailed
from tools.benchmarks.loop import Assignment
from tools.benchmarks.task import Task

AT: dict[str, Any] = {
    "date": "2026-11-23T10:00:00+00:00",
    "commit": "0123456789abcdef",
    "uncommitted_changes": False,
    "command": "python tools/bench_strategies.py --rounds 3 --output docs/benchmarks/x",
    "versions": {"python": "3.11"},
    "processor": "a CPU",
    "processors": 2,
    "kernel": "6.1",
    "congestion_control": "bbr",
    "load_average_before": [0.1, 0.1, 0.1],
}
NAMES = ("alone:ours", "ours:multi_node", "torch:ddp")


class Played:
    """``failing``: contestants with the rounds in which they fail; ``turns``: who had one, with which seed."""

    def __init__(self) -> None:
        self.failing: dict[str, set[int]] = {}
        self.turns: list[tuple[str, int]] = []
        self._rounds: dict[str, int] = {}

    def run_job(self, contestant: Any, assignment: Assignment, place: object) -> list[dict[str, Any]]:
        del place
        number = self._rounds[contestant.name] = self._rounds.get(contestant.name, 0) + 1
        self.turns.append((contestant.name, assignment.task.seed))
        if number in self.failing.get(contestant.name, ()):
            raise JobFailed(f"{contestant.name} ended with exit codes [1, None]\n--- process0.log\nbang")
        steps = assignment.task.steps
        return [
            {
                "step_seconds": [0.1] * steps,
                "losses": [0.5] * steps,
                "accuracies": [[steps, 0.9]],
                "test_losses": [[steps, 0.4]],
                "interface_after": [1000 * (step + 1) for step in range(steps)],
                "sent": {"interface": 1000 * steps, "wire": 1100 * steps},
                "paused_seconds": 0.0,
                "facts": {},
            }
        ] * 2


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    @contextlib.contextmanager
    def no_lab(nodes: int, rate: str) -> Iterator[tuple[int, str]]:
        yield nodes, rate

    found = Played()
    monkeypatch.setattr(module, "Lab", no_lab)
    monkeypatch.setattr(module, "run_job", found.run_job)
    return found


def benchmark(**changed: Any) -> Benchmark:
    settings: dict[str, Any] = {
        "task": Task(steps=20),
        "chosen": [parse(name) for name in NAMES],
        "nodes": 2,
        "ranks_per_node": 1,
        "rate": "1gbit",
        "repeats": 3,
        "seeds": 3,
        "target": 0.95,
        "timeout_seconds": 1.0,
        "start_iteration": 10,
        "measure_seconds": 0.0,
    }
    return Benchmark(**(settings | changed))


def written(made: Benchmark, path: Path) -> dict[str, Any]:
    summaries = made.summaries()
    record.write(path, made.record(), summaries, made.predictions(summaries))
    content: dict[str, Any] = json.loads(record.beside(path, ".json").read_text())
    return content


def test_every_contestant_runs_in_each_round_with_the_rounds_seed(played: Played) -> None:
    made = benchmark(seeds=2)
    kept: list[int] = []
    made.run(AT, lambda: kept.append(len(made.rounds)))
    assert [name for name, _ in played.turns] == list(NAMES) * 3
    assert [seed for _, seed in played.turns] == [0] * 3 + [1] * 3 + [0] * 3
    assert kept == list(range(1, 10)), "the record is kept after every turn"
    assert made.whole_rounds() == 3


def test_an_interrupted_record_says_what_it_has_and_is_continued(played: Played, tmp_path: Path) -> None:
    made = benchmark()

    def interrupt() -> None:
        written(made, tmp_path / "x.1gbit")
        if len(made.rounds) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run(AT, interrupt)
    content = json.loads((tmp_path / "x.1gbit.json").read_text())
    assert (content["whole_rounds"], content["repeats"], len(content["rounds"])) == (1, 3, 5)
    assert "- **1 of 3 rounds**" in (tmp_path / "x.1gbit.md").read_text()
    again = benchmark()
    again.go_on_from(content)
    again.run(AT | {"date": "2026-11-24"}, lambda: None)
    assert [name for name, _ in played.turns] == list(NAMES) * 3
    assert [each["rounds"] for each in again.sittings] == [[1, 2], [2, 3]]
    assert again.whole_rounds() == 3
    page = record.page("x", again.record(), again.summaries(), {})
    assert "- Rounds 1, 2, 2026-11-23" in page
    assert "- Rounds 2, 3, 2026-11-24" in page


def test_who_fails_is_noted_tried_again_and_left_out_after_the_second_time(played: Played, tmp_path: Path) -> None:
    played.failing = {"ours:multi_node": {1, 2}}
    made = benchmark(repeats=4, seeds=4)
    made.run(AT, lambda: None)
    assert [name for name, _ in played.turns].count("ours:multi_node") == 2
    assert [(each["round"], each["reason"]) for each in made.failures] == [
        (1, "ours:multi_node ended with exit codes [1, None]"),
        (2, "ours:multi_node ended with exit codes [1, None]"),
    ]
    assert "bang" in made.failures[0]["output"]
    assert list(written(made, tmp_path / "x")["summary"]) == ["alone:ours", "torch:ddp"]
    assert "**Failed**: ours:multi_node in round 2" in (tmp_path / "x.md").read_text()
    assert made.whole_rounds() == 4


def test_figures_of_who_failed_once_are_those_of_its_other_rounds(played: Played) -> None:
    played.failing = {"torch:ddp": {2}}
    made = benchmark()
    made.run(AT, lambda: None)
    assert list(made.summaries()["torch:ddp"].round_step_ms) == [1, 3]


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rate": "100mbit"}, "lab"),
        ({"task": Task(steps=30)}, "task"),
        ({"chosen": [parse("torch:ddp")]}, "contestants"),
        ({"target": 0.9}, "target"),
    ],
)
def test_a_record_with_other_settings_is_not_continued(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    made = benchmark(repeats=1)
    made.run(AT, lambda: None)
    content = written(made, tmp_path / "x")
    with pytest.raises(ValueError, match=rf"other settings \({named}: "):
        benchmark(**changed).go_on_from(content)


@pytest.mark.usefixtures("played")
def test_the_remaining_time_is_estimated_from_each_contestants_own_turns() -> None:
    assert seconds_left(["a", "b"], [("a", 10.0), ("a", 20.0), ("b", 1.0)]) == 16.0
    assert seconds_left(["a", "b"], [("a", 10.0)]) is None
    assert seconds_left([], []) == 0.0
    made = benchmark()
    assert "9 turns left; the remaining time is known after the first round" in made.told_left()
    made.run(AT, lambda: None)
    assert "nothing left" in made.told_left()
    for each in made.rounds:
        each["seconds"] = 60.0
    made.repeats = 5
    assert "6 turns left, about 6 min" in made.told_left()


@pytest.mark.usefixtures("played")
def test_another_checkout_is_named_by_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "git", lambda root, *words: f"{root.name}: {words[0]}")
    made = benchmark(repeats=1, before=tmp_path)
    made.run(AT, lambda: None)
    content = written(made, tmp_path / "x")
    assert content["before_commit"] == f"{tmp_path.name}: rev-parse"
    assert "- *before*: commit " in (tmp_path / "x.md").read_text()
    with pytest.raises(ValueError, match="before_commit"):
        benchmark().go_on_from(content)


def add(tmp_path: Path, at: dict[str, Any]) -> None:
    made = benchmark(repeats=1)
    made.run(AT, lambda: None)
    written(made, tmp_path / "x")
    bench_strategies._go_on(benchmark(), tmp_path / "x", at)


@pytest.mark.usefixtures("played")
def test_rounds_are_added_on_the_same_processor_with_the_same_code(tmp_path: Path) -> None:
    add(tmp_path, AT)
    with pytest.raises(click.UsageError, match="the record is of a CPU, this is another"):
        add(tmp_path, AT | {"processor": "another"})
    with pytest.raises(click.UsageError, match="have changed since the record's commit 0123456789"):
        add(tmp_path, AT | {"commit": "fedcba9876543210"})


def test_a_record_is_not_written_over_by_accident(tmp_path: Path) -> None:
    (tmp_path / "x.json").touch()
    with pytest.raises(click.UsageError, match="exists already: give --add"):
        bench_strategies._output(tmp_path / "x", quick=False, add=False)
    assert bench_strategies._output(tmp_path / "x", quick=False, add=True) == tmp_path / "x"
    with pytest.raises(click.UsageError, match=r"there is no .*y\.json to continue"):
        bench_strategies._output(tmp_path / "y", quick=False, add=True)
    with pytest.raises(click.UsageError, match="--output is missing"):
        bench_strategies._output(None, quick=False, add=False)
