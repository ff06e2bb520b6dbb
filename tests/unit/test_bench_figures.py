"""From records to figures, by hand-made records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fleet_train.plan.predict import Link, Network
from tools.benchmarks.figures import (
    block_means,
    job_steps,
    paired_difference,
    paired_ratio,
    percentile,
    predicted,
    summarise,
    time_to_target,
    wire_ms,
)
from tools.benchmarks.prediction import predicted_step_ms
from tools.benchmarks.report import row_of, table


def rank(seconds: Sequence[float], **changed: Any) -> dict[str, Any]:
    """One rank's record: 3 steps of set-up, 8 of warm-up in all, then what is timed."""
    record: dict[str, Any] = {
        "step_seconds": [9.0, 9.0, 9.0, *[0.5] * 5, *seconds],
        "losses": [2.0] * 8 + [0.25] * len(seconds),
        "accuracies": [[8, 0.9], [12, 0.96], [8 + len(seconds), 0.97]],
        "sent": {"interface": 8_000_000, "wire": 8_400_000},
        "facts": {},
    }
    return record | changed


def test_periodic_steps_are_compared_by_blocks() -> None:
    assert block_means([1.0, 3.0] * 8, 8) == [2.0, 2.0]
    assert block_means([1.0, 2.0, 3.0, 4.0, 5.0], 2) == [1.5, 3.5]
    assert block_means([1.0, 3.0], 8) == [2.0]


def test_percentiles_are_interpolated() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0, 5.0], 10) == pytest.approx(1.4)
    assert percentile([7.0], 90) == 7.0


def test_a_step_is_the_mean_of_its_ranks() -> None:
    assert job_steps([{"step_seconds": [1.0, 2.0]}, {"step_seconds": [3.0, 2.0]}]) == [2.0, 2.0]


def test_time_to_target_leaves_out_the_set_up() -> None:
    ranks = [rank([0.1] * 8)]
    assert time_to_target(ranks, 0.9) == (pytest.approx(2.5), 8)
    assert time_to_target(ranks, 0.95) == (pytest.approx(2.9), 12)
    assert time_to_target(ranks, 0.99) == (None, None)


def test_prediction_of_a_rank_is_the_link_where_it_is_alone_on_its_node() -> None:
    assert predicted({"predicted_bytes_per_step": 100.0}, 1) == 100.0
    assert predicted({"predicted_bytes_per_step": 100.0}, 2) is None
    assert predicted({"predicted_bytes_per_step": 100.0, "predicted_link_bytes_per_step": 50}, 2) == 50.0
    assert predicted({}, 1) is None


def test_ratios_are_taken_within_a_round() -> None:
    assert paired_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 3.0]) == 0.5
    assert paired_difference([3.0, 30.0, 5.0], [1.0, 10.0, 4.0]) == 2.0


def test_wire_time_follows_the_rate() -> None:
    assert wire_ms(12_500_000, "1gbit") == pytest.approx(100.0)
    assert wire_ms(12_500_000, "100mbit") == pytest.approx(1000.0)
    assert wire_ms(12_500_000, "2.5gbit") == pytest.approx(40.0)
    assert wire_ms(1, "none") is None


def test_rounds_become_a_summary() -> None:
    summary = summarise([[rank([0.1] * 8)], [rank([0.3] * 8)]], 8, 1, 0.95)
    assert summary.step_ms == pytest.approx(200.0)
    assert summary.round_step_ms == (pytest.approx(100.0), pytest.approx(300.0))
    assert summary.interface_bytes == pytest.approx(1_000_000)
    assert summary.wire_bytes == pytest.approx(1_050_000)
    assert (summary.loss, summary.accuracy) == (pytest.approx(0.25), pytest.approx(0.97))
    assert summary.median_seconds_to_target == pytest.approx(3.3)
    assert summary.steps_to_target == (12, 12)


def test_a_target_missed_once_is_not_reached() -> None:
    missed = rank([0.1] * 8, accuracies=[[16, 0.5]])
    assert summarise([[rank([0.1] * 8)], [missed]], 8, 1, 0.95).median_seconds_to_target is None


def test_only_one_rank_of_a_node_counts_its_link() -> None:
    silent = {"interface": 0, "wire": 0}
    summary = summarise([[rank([0.1] * 8), rank([0.1] * 8, sent=silent)]], 8, 2, 0.95)
    assert summary.interface_bytes == pytest.approx(1_000_000)


def test_table_has_ratios_beside_times() -> None:
    jobs = {
        "alone:ours": [rank([0.02] * 8)],
        "ours:x": [rank([0.1] * 8, facts={"predicted_bytes_per_step": 1_000_000})],
        "torch:ddp": [rank([0.2] * 8)],
    }
    summaries = {name: summarise([ranks], 8, 1, 0.95) for name, ranks in jobs.items()}
    row = row_of("ours:x", summaries, "1gbit")
    assert (row.ratio, row.efficiency) == (pytest.approx(0.5), pytest.approx(0.2))
    assert (row.exposed_ms, row.wire_ms) == (pytest.approx(80.0), pytest.approx(8.4))
    assert row.sent_over_predicted == pytest.approx(1.0)
    assert row.over_before is None
    assert "step / before" not in table(summaries, "1gbit")
    twins = {"ours:x": summaries["ours:x"], "before:x": summaries["ours:x"]}
    assert row_of("ours:x", twins, "1gbit").over_before == 1.0
    assert "step / before" in table(twins, "1gbit")
    assert row_of("torch:ddp", summaries, "1gbit").exposed_ms is None, "its compute-only run did not take part"
    assert table(summaries, "1gbit", {"ours:x": 90.0}).splitlines()[3] == (
        "| ours:x | 100.0 (100.0 to 100.0) | 90.0 | 0.50 | 0.20 | 80.0 | 9.52 | 1,000.0 | 1.000 | 0.2500 | 0.9700 "
        "|  | 2.90 (12) | 1.14 |"
    )


def test_accuracy_is_compared_with_the_first_synchronous_profile() -> None:
    planned = {"gradients": [["w", [4, 4], "float32"]]}
    jobs = {
        "alone:ours": [rank([0.02] * 8, facts={"profile": {}})],
        "ours:local": [rank([0.1] * 8, facts=planned | {"profile": {"use_local_sgd": True}})],
        "ours:whole": [rank([0.1] * 8, accuracies=[[16, 0.98]], facts=planned | {"profile": {}})],
        "torch:ddp": [rank([0.1] * 8, accuracies=[[16, 0.975]])],
    }
    summaries = {name: summarise([ranks], 8, 1, 0.95) for name, ranks in jobs.items()}
    points = [row_of(name, summaries, "1gbit").points_from_synchronous for name in jobs]
    assert points == [None, pytest.approx(-1.0), 0.0, pytest.approx(-0.5)]


def test_a_step_is_predicted_from_the_plan_of_the_record_and_the_measured_link() -> None:
    facts = {"gradients": [["w", [250_000], "float32"]]}
    network = Network(Link(1e-3, 1e8), Link(0.0, 1e12))
    # 2 rounds of 1 ms and 1 MB at 100 MB/s behind 30 ms of computing.
    assert predicted_step_ms("single_node", facts, 2, 1, network, 30.0) == pytest.approx(42.0)
    assert predicted_step_ms("single_node", {}, 2, 1, network, 30.0) is None
