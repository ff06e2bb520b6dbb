"""Ranks that read the same samples are told so, whatever the profile; ranks that share them are not."""

from __future__ import annotations

import pytest

from tests.parallel.same_samples import CASES
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, late_streams: bool) -> RanksResult:
    script = ROOT / "tests" / "parallel" / "same_samples.py"
    return run_ranks(script, 2, folder=tmp_path_factory.mktemp("same"), late_streams=late_streams, timeout_seconds=300)


@pytest.mark.parametrize("case", CASES)
def test_the_same_samples_are_noticed_once_in_a_program_by_every_rank(ranks: RanksResult, case: str) -> None:
    for found in ranks.of_all("found"):
        same, own = found[case]
        assert len(same) == 1
        assert "all ranks computed the same gradient twice in a row" in same[0]
        assert own == []


@pytest.mark.parametrize("case", ["zero gradients", "a bias"])
def test_gradients_that_are_equal_by_nature_accuse_nobody(ranks: RanksResult, case: str) -> None:
    assert [innocent[case] for innocent in ranks.of_all("innocent")] == [[], []]
