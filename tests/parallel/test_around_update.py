"""A NaN on one rank: all ranks skip the same update. The weights' average follows the updates that were made."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, late_streams: bool) -> Ranks:
    folder = tmp_path_factory.mktemp("around_update")
    script = ROOT / "tests/parallel/around_update.py"
    result = run_ranks(script, 2, folder=folder, nodes=2, timeout_seconds=150, late_streams=late_streams)
    cases: Ranks = result.of_all("cases")
    return cases


@pytest.mark.parametrize(
    ("name", "updates"), [("synchronous", 6), ("synchronised batch norm", 6), ("gradient merge", 2)]
)
def test_all_ranks_skip_the_same_update_and_nothing_is_left_of_it(ranks: Ranks, name: str, updates: int) -> None:
    found = [rank[name] for rank in ranks]
    assert [(each["skipped"], each["updates"], each["finite"]) for each in found] == [(1, updates, True)] * 2
    assert len({each["weights_digest"] for each in found}) == 1


def test_in_a_local_step_only_the_rank_itself_skips(ranks: Ranks) -> None:
    found = [rank["LocalSGD"] for rank in ranks]
    assert [(each["skipped"], each["updates"], each["finite"]) for each in found] == [(0, 7, True), (1, 6, True)]


@pytest.mark.parametrize("name", ["synchronous", "synchronised batch norm", "gradient merge"])
def test_average_is_that_of_the_weights_and_equal_on_all_ranks(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        assert rank[name]["averaged"] == 6
        assert rank[name]["average_error"] < 1e-6
    assert len({rank[name]["average_digest"] for rank in ranks}) == 1


def test_localsgds_average_is_equal_on_all_ranks(ranks: Ranks) -> None:
    assert len({rank["LocalSGD"]["average_digest"] for rank in ranks}) == 1
