"""Fewer step barriers change when ranks wait, and no bit of what they train."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.few_barriers import CASES
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, False), id="2"),
        pytest.param((3, False), id="3", marks=pytest.mark.long),
        pytest.param((2, True), id="2, s", marks=pytest.mark.long),
        pytest.param((3, True), id="3, s", marks=pytest.mark.long),
    ],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    size, late_streams = request.param
    folder = tmp_path_factory.mktemp("few_barriers")
    script = ROOT / "tests/parallel/few_barriers.py"
    return run_ranks(script, size, folder=folder, nodes=size, late_streams=late_streams).of_all("found")


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_optimizer_state_are_the_same_bits(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        assert rank[case]["few"][0] == rank[case]["all"][0] != rank[case]["start"]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_choose_the_same_steps(ranks: Ranks, case: str) -> None:
    names = ranks[0][case]["few"][1]
    assert all(rank[case]["few"][1] == names for rank in ranks)
    assert set(names) < set(ranks[0][case]["all"][1])


@pytest.mark.parametrize("case", [case for case, (_, steps) in CASES.items() if steps])
def test_steps_with_a_barrier_are_those_of_the_rule(ranks: Ranks, case: str) -> None:
    names = ranks[0][case]["few"][1]
    assert [name for name in names if name.startswith("step ")] == [f"step {step}" for step in CASES[case][1]]
    averagings = [name for name in ranks[0][case]["all"][1] if not name.startswith("step ")]
    assert [name for name in names if not name.startswith("step ")] == averagings
