"""The benchmark of strategies with simulated ranks: what takes part, what is kept, and what its figures mean."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import paddle
import pytest

from fleet_train.profile import load_profile
from tests.support.processes import ROOT
from tools.benchmarks import strategies
from tools.benchmarks.jobs import JobFailed, Place, commands_of
from tools.benchmarks.ranks import Assignment
from tools.benchmarks.record import Keep, beside
from tools.benchmarks.report import (
    Summary,
    Window,
    family_of,
    figures_table,
    page,
    predicted,
    rows_of,
    steps_to_target,
    summarise,
    window_of,
    wire_ms,
)
from tools.benchmarks.strategies import SCENARIOS, Benchmark, chosen_contestants, rivals_of
from tools.benchmarks.tasks import (
    TASKS,
    Batches,
    Contestant,
    PaddleKit,
    Task,
    build,
    judged,
    parse,
    start_feed,
    start_weights,
    with_baselines,
)
from tools.lab import Lab

AT: dict[str, Any] = {
    "date": "2026-11-23T10:00:00+00:00", "commit": "0123456789abcdef", "uncommitted_changes": False, "command": "x",
    "versions": {"python": "3.11"}, "processor": "a CPU", "processors": 2, "kernel": "6.1",
    "load_average_before": [0.1, 0.1, 0.1],
}  # fmt: skip
NAMES = ("alone:ours", "ours:multi_node", "torch:ddp")
PLACE = Place(Lab(2, name="x"), ranks_per_node=2, port=6200)  # not up: nothing is made


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("multi_node", "is not one of ours"),
        ("horovod:x", "is not one of ours"),
        ("torch:powersgd", "PyTorch takes part as"),
        ("alone:jax", "alone takes ours or torch"),
    ],
)
def test_unknown_names_are_refused(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(word)


def test_compute_only_runs_come_first_and_once() -> None:
    names = [each.name for each in with_baselines(["ours:a", "torch:ddp", "before:a", "ours:b", "ours:a"])]
    assert names == ["alone:ours", "alone:torch", "ours:a", "torch:ddp", "before:a", "ours:b"]
    assert [parse(word).is_tuned for word in ("ours:a", "ours:b/a.yaml", "torch:ddp_4mb")] == [False, True, False]


def test_rivals_have_the_ranks_periods_and_starts_of_the_profiles() -> None:
    profiles = [load_profile(name) for name in ("multi_node", "powersgd", "local_sgd", "diloco")]
    power, local = profiles[1], profiles[2]
    assert rivals_of(profiles) == [
        "torch:ddp",
        "torch:ddp_4mb",
        "torch:bf16",
        "torch:bf16_4mb",
        f"torch:powersgd_{power.powersgd_rank}_from_{power.powersgd_start_step}",
        f"torch:post_local_sgd_{local.local_sgd_steps}_from_{local.local_sgd_is_warm_steps}",
    ]
    both = [each.name for each in chosen_contestants(["unfused"], "torch:ddp", has_before=True)]
    assert both == ["alone:ours", "alone:torch", "ours:unfused", "before:unfused", "torch:ddp"]
    with pytest.raises(click.UsageError, match="no_such_profile"):
        chosen_contestants(["no_such_profile"], "none")


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_made_of_flags_and_contestants_that_exist(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.keys() <= {option.name for option in strategies.main.params}
    ours = [str(ROOT / word) if word.endswith(".yaml") else word for word in scenario["ours"]]
    assert len(chosen_contestants(ours, scenario.get("rivals", "default"))) > len(ours)


def test_ours_starts_a_launcher_per_node_and_before_with_the_package_of_another_checkout() -> None:
    (_, _), (command, added) = commands_of(parse("ours:unfused"), Path("/f"), PLACE)
    assert command[:4] == ["ip", "netns", "exec", "ftlab-x-1"]
    assert "--cluster_node_ips=10.78.0.1,10.78.0.2" in command
    assert {"--node_ip=10.78.0.2", "--nproc_per_node=2", "--strategy=unfused"} <= set(command)
    assert added == {}
    _, (same, added) = commands_of(parse("before:unfused"), Path("/f"), dataclasses.replace(PLACE, before=Path("/old")))
    assert (same, added) == (command, {"PYTHONPATH": "/old"})


def test_torch_starts_every_rank_with_its_place() -> None:
    commands = commands_of(parse("torch:ddp"), Path("/f"), PLACE)
    places = [(command[3], command[-1]) for command, _ in commands]
    assert places == [("ftlab-x-0", "0"), ("ftlab-x-0", "1"), ("ftlab-x-1", "2"), ("ftlab-x-1", "3")]
    place = {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "6200", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert commands[3][1] == {"GLOO_SOCKET_IFNAME": "eth0"} | place


def test_ranks_share_a_global_batch_without_overlap() -> None:
    task = Task(global_batch_size=8)
    whole, labels = Batches(task, 0, 1).at(5)
    halves = [Batches(task, rank, 2).at(5) for rank in (0, 1)]
    np.testing.assert_array_equal(np.concatenate([features for features, _ in halves]), whole)
    np.testing.assert_array_equal(np.concatenate([part for _, part in halves]), labels)
    with pytest.raises(ValueError, match="global_batch_size=8 is not a multiple of 3 ranks"):
        Batches(task, 0, 3)


@pytest.mark.parametrize(("name", "values", "tensors"), [("mlp", 2_919_690, 18), ("resnet18", 11_172_810, 62)])
def test_start_weights_reach_paddle_in_their_order_and_both_modes(name: str, values: int, tensors: int) -> None:
    task = dataclasses.replace(TASKS[name], seed=2)
    paddle.disable_static()
    parameters = build(task, PaddleKit(task)).parameters()
    eager, trained = [each.numpy() for each in parameters], [each for each in parameters if each.trainable]
    paddle.enable_static()
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(scope):
        network = build(task, PaddleKit(task))
        feed = start_feed(task, startup)
        paddle.static.Executor().run(startup, feed=feed)
        static = [np.array(scope.find_var(each.name).get_tensor()) for each in network.parameters()]
    paddle.disable_static()
    assert (sum(each.size for each in trained), len(feed)) == (values, tensors)
    for start, one, other in zip(start_weights(task), eager, static, strict=True):
        np.testing.assert_array_equal(one, start)
        np.testing.assert_array_equal(other, start)


def test_a_network_that_says_nothing_has_the_loss_of_chance_and_one_that_says_zero_the_share_of_zeros() -> None:
    task, nothing = Task(hidden_layers=0), np.zeros((64, 10), np.float32)
    assert judged(task, [nothing, np.zeros(10, np.float32)])[1] == pytest.approx(np.log(10), rel=1e-5)
    assert judged(task, [nothing, np.eye(10, dtype=np.float32)[0]])[0] == pytest.approx(36 / 359)


class Played:
    """``failing``: contestants with the rounds in which they fail; ``turns``: who had one, with which seed."""

    def __init__(self) -> None:
        self.failing: dict[str, set[int]] = {}
        self.turns: list[tuple[str, int]] = []
        self._rounds: dict[str, int] = {}

    def run(self, contestant: Contestant, assignment: Assignment, place: object) -> list[dict[str, Any]]:
        del place
        number = self._rounds[contestant.name] = self._rounds.get(contestant.name, 0) + 1
        self.turns.append((contestant.name, assignment.task.seed))
        if number in self.failing.get(contestant.name, ()):
            raise JobFailed(f"{contestant.name} ended with exit codes [1]\n--- process0.log\nbang")
        return [rank([0.1] * 12)] * 2


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    @contextlib.contextmanager
    def no_lab(nodes: int, rate: str) -> Iterator[tuple[int, str]]:
        yield nodes, rate

    found = Played()
    monkeypatch.setattr(strategies, "Lab", no_lab)
    monkeypatch.setattr(strategies, "run_contestant", found.run)
    return found


def benchmark(**changed: Any) -> Benchmark:
    settings = {
        "task": Task(steps=20, warmup_steps=8), "chosen": [parse(name) for name in NAMES], "nodes": 2,
        "ranks_per_node": 1, "rate": "1gbit", "repeats": 3, "timeout_seconds": 1.0,
    }  # fmt: skip
    return Benchmark(**(settings | changed))


def keep(made: Benchmark, path: Path) -> dict[str, Any]:
    made.write(Keep(path))
    content: dict[str, Any] = json.loads(beside(path, ".json").read_text())
    return content


def test_an_interrupted_record_says_what_it_has_and_is_continued(played: Played, tmp_path: Path) -> None:
    made = benchmark()

    def interrupt() -> None:
        keep(made, tmp_path / "x.1gbit")
        if len(made.rounds) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run(AT, interrupt)
    content = json.loads((tmp_path / "x.1gbit.json").read_text())
    assert (content["whole_rounds"], content["repeats"], len(content["rounds"])) == (1, 3, 5)
    assert "- **1 of 3 rounds**" in (tmp_path / "x.1gbit.md").read_text()
    again = benchmark()
    again.go_on_from(content, AT)
    again.run(AT | {"date": "2026-11-24"}, lambda: None)
    assert played.turns == [(name, seed) for seed in range(3) for name in NAMES]
    assert [each["rounds"] for each in again.sittings] == [[1, 2], [2, 3]]
    assert again.whole_rounds() == 3
    text = "\n".join(page(again.record(), again.summaries()))
    assert "- Rounds 1, 2, 2026-11-23" in text
    assert "- Rounds 2, 3, 2026-11-24" in text
    drawn = (tmp_path / "x.1gbit.svg").read_text()
    assert drawn.count("<text") == 2 * len(NAMES[1:]) + 2, "each but the compute-only one, and two meanings"


def test_who_fails_is_noted_tried_again_and_left_out_after_the_second_time(played: Played, tmp_path: Path) -> None:
    played.failing = {"ours:multi_node": {1, 2}, "torch:ddp": {2}}
    made = benchmark(repeats=4)
    made.run(AT, lambda: None)
    assert [name for name, _ in played.turns].count("ours:multi_node") == 2
    assert [(each["round"], each["contestant"]) for each in made.failures] == [
        (1, "ours:multi_node"),
        (2, "ours:multi_node"),
        (2, "torch:ddp"),
    ]
    assert "bang" in made.failures[0]["output"]
    assert list(keep(made, tmp_path / "x")["summary"]) == ["alone:ours", "torch:ddp"]
    assert list(made.summaries()["torch:ddp"].round_step_ms) == [1, 3, 4]
    assert "**Failed**: ours:multi_node in round 2: " in (tmp_path / "x.md").read_text()
    assert made.whole_rounds() == 4


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("changed", "at", "named"),
    [
        ({"rate": "100mbit"}, {}, "lab"),
        ({"task": Task(steps=30)}, {}, "task"),
        ({"chosen": [parse("torch:ddp")]}, {}, "contestants"),
        ({"before": ROOT.parent}, {}, "before_commit"),
        ({}, {"processor": "another"}, "processor: a CPU there, another now"),
        ({}, {"commit": "fedcba9876543210"}, "have changed since its commit 0123456789"),
    ],
)
def test_a_record_that_is_not_comparable_is_not_continued(
    changed: dict[str, Any], at: dict[str, Any], named: str, tmp_path: Path
) -> None:
    made = benchmark(repeats=1)
    made.run(AT, lambda: None)
    with pytest.raises(ValueError, match=named):
        benchmark(**changed).go_on_from(keep(made, tmp_path / "x"), AT | at)


def rank(seconds: Sequence[float], **changed: Any) -> dict[str, Any]:
    """One rank's record: 3 steps of set-up, 8 of warm-up in all, then what is timed. 1 MB is sent in every step."""
    steps = 8 + len(seconds)
    record: dict[str, Any] = {
        "step_seconds": [9.0, 9.0, 9.0, *[0.5] * 5, *seconds],
        "accuracies": [[8, 0.9], [12, 0.96], [steps, 0.97]],
        "test_losses": [[8, 0.5], [12, 0.4], [steps, 0.3]],
        "interface_after": [[step, 1_000_000 * step] for step in range(steps + 1)],
        "sent": {"interface": 1_000_000 * steps, "wire": 1_050_000 * steps},
        "paused_seconds": 0.0,
        "facts": {},
    }
    return record | changed


def summary(*rounds: list[dict[str, Any]], target: float = 0.95, ranks_per_node: int = 1) -> Summary:
    return summarise(dict(enumerate(rounds, 1)), 8, ranks_per_node, target)


def test_a_step_is_the_mean_over_whole_periods_and_no_averaging_is_dropped() -> None:
    # Every 4th step averages: 3 x 0.1 + 0.9, so 0.3; a median over blocks of 3 would say 0.1.
    found = summary([rank([0.1, *[0.1, 0.1, 0.1, 0.9] * 3], facts={"settles_after": 5, "period_steps": 4})])
    assert found.step_ms == pytest.approx(300.0)
    assert (found.timed_steps, found.whole_periods) == (12, True)
    short = summary([rank([0.1] * 8, facts={"settles_after": 100, "period_steps": 1})])
    assert "100.0 (100.0 to 100.0) [1]" in figures_table({"ours:x": short}, "1gbit")[2]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, Window(8, 100, True)),
        ({"settles_after": 30, "period_steps": 32}, Window(36, 100, True)),
        ({"settles_after": 90, "period_steps": 32}, Window(8, 100, False)),
    ],
)
def test_the_window_is_whole_periods_behind_the_strategys_own_start(facts: dict[str, int], expected: Window) -> None:
    assert window_of(facts, 8, 100) == expected


def test_rounds_become_a_summary_and_one_rank_of_a_node_counts_its_link() -> None:
    # 8 MB in the warm-up, then 1 kB per step.
    after = [[8, 8_000_000], [16, 8_008_000]]
    first = rank([0.1] * 8, interface_after=after, sent={"interface": 8_008_000, "wire": 8_808_800})
    second = rank([0.3] * 8, interface_after=[[8, 0], [16, 0]])
    found = summary([first, second], [first, first], ranks_per_node=2)
    assert found.round_step_ms == {1: pytest.approx(200.0), 2: pytest.approx(100.0)}
    assert (found.step_ms, found.interface_bytes) == (pytest.approx(150.0), pytest.approx(1000))
    assert (found.wire_bytes, found.accuracy, found.test_losses[1]) == (pytest.approx(1100), 0.97, 0.3)


def test_the_target_is_one_of_the_mean_over_the_rounds_and_stays_reached() -> None:
    assert steps_to_target([(8, 0.94), (16, 0.96), (24, 0.94), (32, 0.95), (40, 0.99)], 0.95) == 32
    assert steps_to_target([(8, 0.96), (16, 0.94)], 0.95) is None
    lucky = [rank([0.1] * 8, accuracies=[[8, 0.96], [12, 0.99], [16, 0.99]])]
    slower = [rank([0.3] * 8, accuracies=[[8, 0.90], [12, 0.93], [16, 0.95]])]
    found = summary(lucky, slower)
    assert found.curve == [(8, pytest.approx(0.93)), (12, pytest.approx(0.96)), (16, pytest.approx(0.97))]
    assert found.seconds_to_target == {1: pytest.approx(2.9), 2: pytest.approx(3.7)}
    assert (found.steps_to_target, found.mean_seconds_to_target) == (12, pytest.approx(3.3))
    assert summary(lucky, slower, target=0.98).seconds_to_target == {}


def test_prediction_of_a_rank_is_the_link_where_it_is_alone_on_its_node() -> None:
    assert predicted({"predicted_bytes_per_step": 100.0}, 1) == 100.0
    assert predicted({"predicted_bytes_per_step": 100.0}, 2) is None
    assert predicted({"predicted_bytes_per_step": 100.0, "predicted_link_bytes_per_step": 50}, 2) == 50.0
    assert [wire_ms(12_500_000, rate) for rate in ("100mbit", "2.5gbit", "none")] == [1000.0, 40.0, None]


PLANNED = {"gradients": [["w", [4, 4], "float32"]], "predicted_bytes_per_step": 1_000_000, "period_steps": 8}


@pytest.mark.parametrize(
    ("profile", "family"),
    [
        ({}, "ddp"),
        ({"compression": "powersgd"}, "powersgd_1"),
        ({"compression": "dgc"}, None),
        ({"use_local_sgd": True}, "post_local_sgd_8"),
        ({"use_local_sgd": True, "outer_optimizer": "diloco"}, None),
        ({"accumulate_steps": 4}, None),
    ],
)
def test_a_profile_has_a_twin_of_pytorchs(profile: dict[str, Any], family: str | None) -> None:
    assert family_of(PLANNED | {"profile": profile}) == family


def test_rows_compare_within_a_round_with_the_best_rival_and_with_the_twin() -> None:
    local = PLANNED | {"profile": {"use_local_sgd": True}}
    few = [[8, 32_000], [16, 64_000]]
    sooner = [[8, 0.96], [12, 0.96], [16, 0.96]]
    jobs = {
        "alone:ours": ([0.02] * 8, {"facts": {"profile": {}}}),
        "ours:whole": ([0.1] * 8, {"facts": PLANNED | {"profile": {}}}),
        "before:whole": ([0.2] * 8, {"facts": PLANNED | {"profile": {}}}),
        "ours:a/local.yaml": ([0.04] * 8, {"facts": local, "interface_after": few, "accuracies": sooner}),
        "torch:ddp": ([0.2] * 8, {}),
        "torch:ddp_4mb": ([0.16] * 8, {}),
        "torch:post_local_sgd_8": ([0.08] * 8, {}),
    }
    # The machine is half as fast in round 2, and in round 3 all are equal: medians alone would compare other rounds.
    found = {
        name: summary([rank(one, **more)], [rank([2 * each for each in one], **more)])
        for name, (one, more) in jobs.items()
    }
    rows = rows_of(found, "1gbit")
    whole, tuned = rows["ours:whole"], rows["ours:a/local.yaml"]
    assert whole["ratio"] == pytest.approx(0.1 / 0.16), "the 4 MB buckets are the better ones"
    assert (whole["twin"], whole["over_twin"]) == ("torch:ddp_4mb", pytest.approx(0.1 / 0.16))
    assert (tuned["twin"], tuned["over_twin"]) == ("torch:post_local_sgd_8", pytest.approx(0.5))
    assert (whole["over_before"], whole["over_compute"], whole["efficiency"]) == pytest.approx((0.5, 5.0, 0.2))
    assert (whole["exposed_ms"], whole["wire_ms"]) == pytest.approx((120.0, 8.4))
    assert (whole["sent_over_predicted"], tuned["times_fewer_bytes"]) == pytest.approx((1.0, 250.0))
    assert tuned["points_from_synchronous"] == pytest.approx((-1.0, -1.0, -1.0))
    # 2.5 s until step 8 against 2.5 + 4 x 0.16 s until step 12; in round 2, with 4 x 0.32 s.
    assert tuned["target_ratio"] == pytest.approx((3.14 + 3.78) / 2 / 2.5)
    headings, _, *lines = (line.strip("| ").split(" | ") for line in figures_table(found, "1gbit"))
    cells = dict(zip(headings, lines[3], strict=False))
    assert (cells["contestant"], cells["step / its PyTorch twin"]) == (
        "ours:a/local.yaml (tuned)",
        "0.50 (torch:post_local_sgd_8)",
    )
    assert cells["s to target (steps)"] == "2.50 (8)"
