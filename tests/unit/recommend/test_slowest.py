"""Measurements of several ranks become one number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fleet_train.plan import TensorSpec
from fleet_train.recommend import calibrate
from fleet_train.recommend.supervisor import read_computing
from tests.unit.collectives.one_of_two import OneOfTwo, one_of_two

TIMES = {0: 0.002, 1: 0.005, 2: 0.001, 3: 0.009}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    with one_of_two(monkeypatch) as made:
        yield made


def test_a_calibration_takes_the_slowest_of_all_ranks(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "all_gather", lambda _, value: TIMES | {0: value})
    assert calibrate._slowest(job, 0.002) == 0.009
    assert calibrate._slowest(job, 0.011) == 0.011


def report(*timed: float) -> dict[str, Any]:
    """Of a rank whose first steps, which compile, took long."""
    gradient = {"name": "w", "shape": [3, 2], "dtype": "float32"}
    statistic = {"name": "mean", "shape": [2], "dtype": "float32"}
    averaging = {"values": [gradient], "statistics": [statistic], "state_values_per_parameter": 2}
    return {
        "plan": {"buckets": [{"gradients": [gradient]}], "averaging": averaging, "statistics": []},
        "steps": [*[9.0] * 50, *timed],
        "links": {},
        "costs": {},
        "is_gloo": True,
    }


@pytest.mark.parametrize(
    ("ranks", "seconds", "spread"),
    [
        ([[1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]], 2.0, 1.0),  # each step has a rank that takes 2 s
        ([[1.0, 1.0, 1.0, 1.0], [4.0, 4.0, 4.0, 4.0]], 4.0, 4.0),
        ([[3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 5.0]], 3.0, 3.0),
    ],
)
def test_computing_takes_the_slowest_rank_of_each_step(
    monkeypatch: pytest.MonkeyPatch, ranks: list[list[float]], seconds: float, spread: float
) -> None:
    monkeypatch.setattr("fleet_train.recommend.supervisor._UNTIMED_STEPS", 50)
    measured, apart, error = read_computing({rank: report(*steps) for rank, steps in enumerate(ranks)})
    assert (measured.compute_seconds, apart, error) == (seconds, spread, 0.0)
    assert measured.gradients == (TensorSpec("w", (3, 2), "float32"),)
    assert measured.averaged == (TensorSpec("w", (3, 2), "float32"), TensorSpec("mean", (2,), "float32"))
