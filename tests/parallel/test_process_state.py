"""Converting and training leave Paddle's process-wide state as Paddle alone would leave it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

SCRIPT = ROOT / "tests" / "parallel" / "process_state.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(SCRIPT, 1, nodes=0, folder=tmp_path_factory.mktemp("alone")).values[0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, late_streams: bool) -> RanksResult:
    return run_ranks(SCRIPT, 2, folder=tmp_path_factory.mktemp("two"), late_streams=late_streams)


def test_names_programs_mode_device_and_flags_are_those_of_one_process(
    alone: dict[str, Any], two_ranks: RanksResult
) -> None:
    for moment, expected in alone["seen"].items():
        for rank, seen in enumerate(two_ranks.of_all("seen")):
            assert seen[moment] == expected, f"rank {rank} after {moment}"


def test_one_process_itself_keeps_its_objects_and_modes(alone: dict[str, Any]) -> None:
    end = alone["seen"]["facade"]
    kept = ("name generator", "main program", "startup program", "main program of the old IR", "scope")
    assert {name: end[name] for name in kept} == dict.fromkeys(kept, True)
    assert (end["dynamic"], end["dynamic in a new thread"]) == (False, False)


def test_a_network_built_after_minimize_gets_parameters_of_its_own(two_ranks: RanksResult) -> None:
    for names in two_ranks.of_all("names"):
        assert sorted(names) == [
            "fc_0.b_0",
            "fc_0.w_0",
            "fc_1.b_0",
            "fc_1.w_0",
            "fc_2.b_0",
            "fc_2.w_0",
            "fc_3.b_0",
            "fc_3.w_0",
        ]


def test_state_under_a_name_guard_has_the_names_of_one_process(alone: dict[str, Any], two_ranks: RanksResult) -> None:
    assert "gen_learning_rate_0" in alone["guarded"]
    assert two_ranks.of_all("guarded") == [alone["guarded"]] * 2
