"""What ranks tell one another at step barriers: stop requests, equal gradients; and which steps have one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.barriers import FEW, SAMPLES, STOPS
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
        assert rank["innocent"] == [], "gradients that are equal by nature accuse nobody"
