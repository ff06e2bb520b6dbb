"""Buckets are updated one by one if that changes no bit, and together if all gradients are needed first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.update_order import CLIPS, OPTIMIZERS
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("update_order")
    result = run_ranks(ROOT / "tests/parallel/update_order.py", 2, folder=folder, nodes=2, timeout_seconds=150)
    cases: Ranks = result.of_all("cases")
    return cases


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_order_of_updates_changes_no_bit(ranks: Ranks, name: str) -> None:
    assert len({rank[name][clip]["digest"] for rank in ranks for clip in CLIPS}) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_stand_between_the_waits_unless_all_gradients_are_needed(ranks: Ranks, name: str) -> None:
    case = ranks[0][name]
    for clip in ("none", "each by its own norm"):
        assert case[clip]["waits"] > 2
        # All but those of the last bucket, which holds two parameters.
        assert case[clip]["updates_before_the_last_wait"] >= case[clip]["updates"] - 2 > 0
    assert case["all by their norm"]["updates_before_the_last_wait"] == 0
