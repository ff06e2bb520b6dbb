"""What ranks exchange at step barriers: stop requests, and the times of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.step_notes import CASES, SLEEP_SECONDS, STEPS
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]
# The step after which a request of the case becomes known: the next one that communicates, at a barrier.
KNOWN_AFTER = {
    "synchronous": 3,
    "two communicators": 3,
    "gradient merge": 6,
    "few barriers": 5,
    "few barriers, gradient merge": 4,
    "local sgd, warm-up": 2,
    "local sgd, period": 6,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, False), id="2"),
        pytest.param((3, False), id="3", marks=pytest.mark.long),
        pytest.param((2, True), id="2, streams", marks=pytest.mark.long),
    ],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    size, late_streams = request.param
    folder = tmp_path_factory.mktemp("step_notes")
    script = ROOT / "tests/parallel/step_notes.py"
    result = run_ranks(script, size, folder=folder, nodes=size, late_streams=late_streams)
    return [result.values[rank] for rank in range(size)]


@pytest.mark.parametrize("case", CASES)
def test_stop_is_known_to_every_rank_after_the_same_step(ranks: Ranks, case: str) -> None:
    last = len(ranks) - 1
    for rank in ranks:
        known = rank["known"][case]
        assert known[: KNOWN_AFTER[case] - 1] == [None] * (KNOWN_AFTER[case] - 1)
        assert len(set(known[KNOWN_AFTER[case] - 1 :])) == 1
        assert known[-1].startswith(f"rank {last} (127.0.0.{2 + last}:")
        assert known[-1].endswith("): the machine is needed")


@pytest.mark.parametrize("name", ["synchronous", "local"])
def test_the_rank_that_sleeps_is_the_busy_one_that_never_waits(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        busy, waits = rank[name]["rank_step_ms"], rank[name]["rank_wait_ms"]
        assert busy.index(max(busy)) == 1
        assert waits.index(min(waits)) == 1
        assert busy[1] >= 1e3 * SLEEP_SECONDS
        assert max(waits) > 500 * SLEEP_SECONDS


def test_all_ranks_read_the_same_of_one_another(ranks: Ranks) -> None:
    for name in ("rank_step_ms", "rank_wait_ms"):
        assert all(rank["synchronous"][name] == ranks[0]["synchronous"][name] for rank in ranks)


def test_the_waiting_rank_makes_no_progress_and_the_sleeper_does(ranks: Ranks) -> None:
    assert ranks[0]["synchronous"]["exposed_ms"] > 500 * SLEEP_SECONDS > ranks[1]["synchronous"]["exposed_ms"]


def test_steps_bytes_and_periods_are_those_of_the_plan(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["synchronous"]["steps"] == STEPS - 1
        # Gloo cuts a buffer into whole elements: three ranks do not get equal shares.
        assert rank["synchronous"]["bytes_sent"] == pytest.approx(rank["synchronous"]["planned_bytes"], rel=1e-3)
        assert rank["synchronous"]["local_sgd_period"] == 1
        assert rank["local"]["steps"] == 6
        assert rank["local"]["bytes_sent"] == pytest.approx(rank["local"]["planned_bytes"], rel=1e-3)
        assert rank["local"]["local_sgd_period"] == 3


def test_reading_starts_anew(ranks: Ranks) -> None:
    again = ranks[0]["synchronous"]["again"]
    assert (again["steps"], again["bytes_sent"], again["exposed_ms"]) == (0, 0.0, 0.0)


def test_one_process_stops_at_once_and_has_nothing_to_count(tmp_path: Path) -> None:
    script = (
        "from dataclasses import asdict\nfrom fleet_train import fleet\nfrom tests.support.worker import report\n"
        "fleet.init()\nbefore = fleet.stop_requested()\nfleet.request_stop('enough')\n"
        "report(before=before, after=fleet.stop_requested(), read=asdict(fleet.communication()))\n"
    )
    values = run_ranks(script, 1, nodes=0, folder=tmp_path).values[0]
    assert values["before"] is None
    assert values["after"].endswith(": enough")
    assert values["read"] == {
        "steps": 0,
        "exposed_ms": 0.0,
        "gate_wait_ms": 0.0,
        "bytes_sent": 0.0,
        "local_sgd_period": 0,
        "rank_step_ms": [0.0],
        "rank_wait_ms": [0.0],
    }
