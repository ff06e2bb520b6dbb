"""What ranks tell one another at step barriers: stop requests, times, equal gradients; and which steps have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.barriers import FEW, SAMPLES, SLEEP_SECONDS, STOPS, TIMED_STEPS
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[pytest.param((2, False), id="2"), pytest.param((3, True), id="3, streams", marks=pytest.mark.long)],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    size, late = request.param
    script, folder = ROOT / "tests/parallel/barriers.py", tmp_path_factory.mktemp("barriers")
    result = run_ranks(script, size, folder=folder, nodes=size, late_streams=late, timeout_seconds=300)
    return [result.values[rank] for rank in range(size)]


@pytest.mark.parametrize("case", STOPS)
def test_stop_is_known_to_every_rank_after_the_same_step(ranks: Ranks, case: str) -> None:
    last, before = len(ranks) - 1, STOPS[case][2] - 1
    for rank in ranks:
        known = rank["known"][case]
        assert known[:before] == [None] * before
        assert len(set(known[before:])) == 1
        assert known[-1].startswith(f"rank {last} (127.0.0.{2 + last}:")
        assert known[-1].endswith("): the machine is needed")


@pytest.mark.parametrize("name", ["synchronous", "local"])
def test_the_rank_that_sleeps_is_the_busy_one_that_never_waits(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        busy, waits = rank["timed"][name]["rank_step_ms"], rank["timed"][name]["rank_wait_ms"]
        assert busy.index(max(busy)) == 1
        assert waits.index(min(waits)) == 1
        assert busy[1] >= 1e3 * SLEEP_SECONDS
        assert max(waits) > 500 * SLEEP_SECONDS
    if name == "synchronous":
        for word in ("rank_step_ms", "rank_wait_ms"):
            assert all(rank["timed"][name][word] == ranks[0]["timed"][name][word] for rank in ranks)
        exposed = [rank["timed"][name]["exposed_ms"] for rank in ranks]
        assert exposed[0] > 500 * SLEEP_SECONDS > exposed[1]


@pytest.mark.parametrize(("name", "steps", "period"), [("synchronous", TIMED_STEPS - 1, 1), ("local", 6, 3)])
def test_steps_bytes_and_periods_are_those_of_the_plan_and_reading_starts_anew(
    ranks: Ranks, name: str, steps: int, period: int
) -> None:
    for rank in ranks:
        told = rank["timed"][name]
        assert (told["steps"], told["local_sgd_period"]) == (steps, period)
        # Gloo cuts a buffer into whole elements: three ranks do not get equal shares.
        assert told["bytes_sent"] == pytest.approx(told["planned_bytes"], rel=1e-3)
        assert (told["again"]["steps"], told["again"]["bytes_sent"], told["again"]["exposed_ms"]) == (0, 0.0, 0.0)


@pytest.mark.parametrize("case", FEW)
def test_few_barriers_are_those_of_the_rule_on_every_rank_and_change_no_bit(ranks: Ranks, case: str) -> None:
    few, every = (ranks[0]["few"][case][which] for which in ("few", "all"))
    for rank in ranks:
        assert rank["few"][case]["few"]["end"] == rank["few"][case]["all"]["end"] != rank["few"][case]["start"]
        assert rank["few"][case]["few"]["barriers"] == few["barriers"]
    assert set(few["barriers"]) < set(every["barriers"])
    steps = FEW[case][1]
    if steps:
        assert [name for name in few["barriers"] if name.startswith("step ")] == [f"step {step}" for step in steps]
        averagings = [name for name in every["barriers"] if not name.startswith("step ")]
        assert [name for name in few["barriers"] if not name.startswith("step ")] == averagings


@pytest.mark.parametrize("case", SAMPLES)
def test_the_same_samples_are_noticed_once_in_a_program_by_every_rank(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        same, own = rank["advised"][case]
        assert len(same) == 1
        assert "all ranks computed the same gradient twice in a row" in same[0]
        assert own == []
        assert rank["innocent"] == [[], []], "gradients that are equal by nature accuse nobody"


@pytest.mark.long
def test_one_process_stops_at_once_and_has_nothing_to_count(tmp_path: Path) -> None:
    script = (
        "from dataclasses import asdict\nfrom fleet_train import fleet\nfrom tests.support.worker import report\n"
        "fleet.init()\nbefore = fleet.stop_requested()\nfleet.request_stop('enough')\n"
        "report(before=before, after=fleet.stop_requested(), read=asdict(fleet.communication()))\n"
    )
    values = run_ranks(script, 1, nodes=0, folder=tmp_path).values[0]
    assert values["before"] is None
    assert values["after"].endswith(": enough")
    counts = {"steps": 0, "exposed_ms": 0.0, "gate_wait_ms": 0.0, "bytes_sent": 0.0, "local_sgd_period": 0}
    assert values["read"] == counts | {"rank_step_ms": [0.0], "rank_wait_ms": [0.0]}
