"""From records to figures, with hand-made records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fleet_train.plan.price import Link, Network
from tools.benchmarks.figures import (
    Summary,
    Window,
    family_of,
    job_steps,
    paired_differences,
    paired_ratio,
    predicted,
    steps_to_target,
    summarise,
    window_of,
    wire_ms,
)
from tools.benchmarks.prediction import predicted_step_ms
from tools.benchmarks.report import row_of, table


def rank(seconds: Sequence[float], **changed: Any) -> dict[str, Any]:
    """One rank's record: 3 steps of set-up, 8 of warm-up in all, then what is timed. 1 MB is sent in every step."""
    steps = 8 + len(seconds)
    record: dict[str, Any] = {
        "step_seconds": [9.0, 9.0, 9.0, *[0.5] * 5, *seconds],
        "losses": [2.0] * 8 + [0.25] * len(seconds),
        "accuracies": [[8, 0.9], [12, 0.96], [steps, 0.97]],
        "test_losses": [[8, 0.5], [12, 0.4], [steps, 0.3]],
        "interface_after": [1_000_000 * (step + 1) for step in range(steps)],
        "sent": {"interface": 1_000_000 * steps, "wire": 1_050_000 * steps},
        "paused_seconds": 0.0,
        "facts": {},
    }
    return record | changed


def summary(*rounds: list[dict[str, Any]], target: float = 0.95, ranks_per_node: int = 1) -> Summary:
    return summarise(dict(enumerate(rounds, 1)), 8, ranks_per_node, target)


def test_a_step_is_the_mean_over_whole_periods_and_no_averaging_is_dropped() -> None:
    # Every 4th step averages: 3 x 0.1 + 0.9, so 0.3; a median over blocks of 3 would say 0.1.
    steps = [0.1, *[0.1, 0.1, 0.1, 0.9] * 3]
    periodic = {"settles_after": 5, "period_steps": 4}
    found = summary([rank(steps, facts=periodic)])
    assert found.step_ms == pytest.approx(300.0)
    assert (found.timed_steps, found.whole_periods) == (12, True)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, Window(8, 100, True)),
        ({"settles_after": 30, "period_steps": 1}, Window(30, 100, True)),
        ({"settles_after": 30, "period_steps": 32}, Window(36, 100, True)),
        ({"settles_after": 90, "period_steps": 32}, Window(8, 100, False)),
        ({"settles_after": 500, "period_steps": 1}, Window(8, 100, False)),
    ],
)
def test_the_window_is_whole_periods_behind_the_strategys_own_start(facts: dict[str, int], expected: Window) -> None:
    assert window_of(facts, 8, 100) == expected


def test_bytes_are_those_of_the_timed_steps() -> None:
    # 8 MB in the warm-up, then 1 kB per step.
    after = [*range(1_000_000, 9_000_000, 1_000_000), *range(8_001_000, 8_009_000, 1_000)]
    found = summary([rank([0.1] * 8, interface_after=after, sent={"interface": 8_008_000, "wire": 8_808_800})])
    assert found.interface_bytes == pytest.approx(1000)
    assert found.wire_bytes == pytest.approx(1100)


def test_a_step_is_the_mean_of_its_ranks() -> None:
    assert job_steps([{"step_seconds": [1.0, 2.0]}, {"step_seconds": [3.0, 2.0]}]) == [2.0, 2.0]


def test_the_target_is_reached_where_it_stays_reached() -> None:
    assert steps_to_target([(8, 0.94), (16, 0.96), (24, 0.94), (32, 0.95), (40, 0.99)], 0.95) == 32
    assert steps_to_target([(8, 0.96), (16, 0.94)], 0.95) is None
    assert steps_to_target([(8, 0.95)], 0.95) == 8


def test_the_target_is_one_of_the_mean_over_the_rounds() -> None:
    lucky = [rank([0.1] * 8, accuracies=[[8, 0.96], [12, 0.99], [16, 0.99]])]
    slower = [rank([0.3] * 8, accuracies=[[8, 0.90], [12, 0.93], [16, 0.95]])]
    found = summary(lucky, slower)
    assert found.curve == [(8, pytest.approx(0.93)), (12, pytest.approx(0.96)), (16, pytest.approx(0.97))]
    assert found.steps_to_target == 12
    assert found.seconds_to_target == {1: pytest.approx(2.9), 2: pytest.approx(3.7)}
    assert found.mean_seconds_to_target == pytest.approx(3.3)
    assert summary(lucky, slower, target=0.98).seconds_to_target == {}


def test_ranks_share_the_evaluations() -> None:
    one, other = rank([0.1] * 8, accuracies=[[8, 0.5], [16, 0.97]]), rank([0.1] * 8, accuracies=[[12, 0.96]])
    assert [step for step, _ in summary([one, other]).curve] == [8, 12, 16]


def test_prediction_of_a_rank_is_the_link_where_it_is_alone_on_its_node() -> None:
    assert predicted({"predicted_bytes_per_step": 100.0}, 1) == 100.0
    assert predicted({"predicted_bytes_per_step": 100.0}, 2) is None
    assert predicted({"predicted_bytes_per_step": 100.0, "predicted_link_bytes_per_step": 50}, 2) == 50.0
    assert predicted({}, 1) is None


def test_ratios_are_taken_within_a_round() -> None:
    assert paired_ratio({1: 1.0, 2: 10.0, 3: 3.0}, {1: 2.0, 2: 20.0, 3: 3.0}) == 0.5
    assert paired_ratio({1: 1.0, 2: 10.0}, {2: 20.0, 3: 1.0}) == 0.5
    assert paired_ratio({1: 1.0}, {2: 1.0}) is None
    assert paired_differences({1: 3.0, 2: 30.0}, {1: 1.0, 2: 10.0}) == [2.0, 20.0]


def test_wire_time_follows_the_rate() -> None:
    assert wire_ms(12_500_000, "1gbit") == pytest.approx(100.0)
    assert wire_ms(12_500_000, "100mbit") == pytest.approx(1000.0)
    assert wire_ms(12_500_000, "2.5gbit") == pytest.approx(40.0)
    assert wire_ms(1, "none") is None


def test_rounds_become_a_summary() -> None:
    found = summary([rank([0.1] * 8)], [rank([0.3] * 8)])
    assert found.step_ms == pytest.approx(200.0)
    assert found.round_step_ms == {1: pytest.approx(100.0), 2: pytest.approx(300.0)}
    assert found.interface_bytes == pytest.approx(1_000_000)
    assert found.wire_bytes == pytest.approx(1_050_000)
    assert found.losses == {1: pytest.approx(0.25), 2: pytest.approx(0.25)}
    assert (found.accuracy, found.test_losses[1]) == (pytest.approx(0.97), pytest.approx(0.3))


def test_only_one_rank_of_a_node_counts_its_link() -> None:
    silent = [0] * 16
    found = summary([rank([0.1] * 8), rank([0.1] * 8, interface_after=silent)], ranks_per_node=2)
    assert found.interface_bytes == pytest.approx(1_000_000)


PLANNED: dict[str, Any] = {
    "gradients": [["w", [4, 4], "float32"]],
    "predicted_bytes_per_step": 1_000_000,
    "period_steps": 8,
}


@pytest.mark.parametrize(
    ("profile", "family"),
    [
        ({}, "ddp"),
        ({"compression": "bf16"}, "bf16"),
        ({"compression": "powersgd"}, "powersgd_1"),
        ({"compression": "dgc"}, None),
        ({"use_local_sgd": True}, "post_local_sgd_8"),
        ({"use_local_sgd": True, "outer_optimizer": "diloco"}, None),
        ({"accumulate_steps": 4}, None),
    ],
)
def test_a_profile_has_a_twin_of_pytorchs(profile: dict[str, Any], family: str | None) -> None:
    assert family_of(PLANNED | {"profile": profile}) == family


def some_jobs() -> dict[str, Summary]:
    few = [4_000 * (step + 1) for step in range(16)]
    local = PLANNED | {"profile": {"use_local_sgd": True}}
    jobs = {
        "alone:ours": [rank([0.02] * 8, facts={"profile": {}})],
        "ours:whole": [rank([0.1] * 8, facts=PLANNED | {"profile": {}})],
        "ours:a/local.yaml": [
            rank([0.04] * 8, facts=local, interface_after=few, accuracies=[[8, 0.96], [12, 0.96], [16, 0.96]])
        ],
        "torch:ddp": [rank([0.2] * 8)],
        "torch:ddp_4mb": [rank([0.16] * 8)],
        "torch:post_local_sgd_8": [rank([0.08] * 8)],
    }
    return {name: summary(ranks) for name, ranks in jobs.items()}


def test_rows_compare_with_the_best_rival_and_with_the_twin() -> None:
    jobs = some_jobs()
    whole, local = row_of("ours:whole", jobs, "1gbit"), row_of("ours:a/local.yaml", jobs, "1gbit")
    assert whole.ratio == pytest.approx(0.1 / 0.16), "the 4 MB buckets are the better ones"
    assert (whole.twin, whole.over_twin) == ("torch:ddp_4mb", pytest.approx(0.1 / 0.16))
    assert (local.twin, local.over_twin) == ("torch:post_local_sgd_8", pytest.approx(0.5))
    assert (whole.over_compute, whole.efficiency) == (pytest.approx(5.0), pytest.approx(0.2))
    assert (whole.exposed_ms, whole.wire_ms) == (pytest.approx(80.0), pytest.approx(8.4))
    assert (whole.sent_over_predicted, whole.times_fewer_bytes) == (pytest.approx(1.0), pytest.approx(1.0))
    assert local.times_fewer_bytes == pytest.approx(250.0)
    assert local.points_from_synchronous == pytest.approx((-1.0, -1.0, -1.0))
    # 2.5 s until step 8 against 2.5 + 4 x 0.16 s, or 4 x 0.08 s of the best hook, until step 12.
    assert local.target_ratio == pytest.approx(3.14 / 2.5)
    assert local.hook_ratio == pytest.approx(2.82 / 2.5)
    assert (whole.tuned, local.tuned) == (False, True)


def test_table_has_ratios_beside_times_and_names_what_is_tuned() -> None:
    text = table(some_jobs(), "1gbit", {"ours:whole": 90.0})
    headings = [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]
    rows = [dict(zip(headings, (cell.strip() for cell in line[1:-1].split("|")), strict=True))
            for line in text.splitlines()[2:]]  # fmt: skip
    assert "step / before" not in headings
    assert rows[1]["step ms (min to max)"] == "100.0 (100.0 to 100.0)"
    assert (rows[1]["predicted step ms"], rows[1]["step / best DDP"]) == ("90.0", "0.62")
    assert rows[2]["contestant"] == "ours:a/local.yaml (tuned)"
    assert rows[2]["step / its PyTorch twin"] == "0.50 (torch:post_local_sgd_8)"
    assert rows[2]["points from synchronous (min to max)"] == "-1.00 (-1.00 to -1.00)"
    assert rows[2]["s to target (steps)"] == "2.50 (8)"
    assert (rows[0]["test accuracy (min to max)"], rows[0]["kB sent per step and node"]) == ("", "")


def test_ours_stands_beside_its_earlier_version() -> None:
    found = summary([rank([0.1] * 8)])
    twins = {"ours:x": found, "before:x": found}
    assert row_of("ours:x", twins, "1gbit").over_before == 1.0
    assert "step / before" in table(twins, "1gbit")


def test_steps_shorter_than_a_period_are_marked() -> None:
    found = summary([rank([0.1] * 8, facts={"settles_after": 100, "period_steps": 1})])
    assert "100.0 (100.0 to 100.0) [1]" in table({"ours:x": found}, "1gbit")


def test_a_step_is_predicted_from_the_plan_of_the_record_and_the_measured_link() -> None:
    facts = {"gradients": [["w", [250_000], "float32"]]}
    network = Network(Link(1e-3, 1e8), Link(0.0, 1e12))
    # 2 rounds of 1 ms and 1 MB at 100 MB/s behind 30 ms of computing.
    assert predicted_step_ms("single_node", facts, 2, 1, network, 30.0) == pytest.approx(42.0)
    assert predicted_step_ms("single_node", {}, 2, 1, network, 30.0) is None
