"""Compression on real ranks: equal to the numpy reference, bit-equal on all ranks, and exact after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

POWERSGD = ["rank 1", "rank 2", "rank 4 after 3 steps", "cold", "forgetful", "full rank", "nothing pays"]
DGC = ["constant", "ramp", "nesterov, clipped", "whole", "large", "all small"]
SEEDS = (0, 1, 2)
QUANTISED = ["int8", "int4", "int4, small blocks", "int8, large", "int4, forgetful", "int4, stochastic"]
KINDS = (("powersgd", POWERSGD), ("dgc", DGC), ("quantised", QUANTISED))
CASES = [[kind, name, seed] for kind, names in KINDS for name in names for seed in SEEDS]
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, False), id="2"),
        pytest.param((3, False), id="3", marks=pytest.mark.long),
        pytest.param((2, True), id="2, streams", marks=pytest.mark.long),
    ],
)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    world_size, late_streams = request.param
    return run_ranks(
        ROOT / "tests/parallel/compression_ranks.py",
        world_size,
        folder=tmp_path_factory.mktemp("compression"),
        nodes=world_size,
        # A device draws other random numbers than the reference.
        args=[json.dumps([case for case in CASES if not late_streams or "stochastic" not in case[1]])],
        late_streams=late_streams,
    )


def each(result: RanksResult) -> list[tuple[str, list[dict[str, Any]]]]:
    """Each case with what the ranks found."""
    ranks = result.of_all("cases")
    assert len(ranks[0]) in (len(CASES), len(CASES) - len(SEEDS))
    return [(case, [rank[case] for rank in ranks]) for case in ranks[0]]


def test_updates_are_those_of_the_reference(result: RanksResult) -> None:
    for case, ranks in each(result):
        assert max(rank["difference"] for rank in ranks) < RELATIVE_TOLERANCE, case


def test_every_rank_gets_the_same_bits(result: RanksResult) -> None:
    for case, ranks in each(result):
        assert len({rank["updates"] for rank in ranks}) == 1, case


def test_a_resumed_method_continues_with_the_same_bits(result: RanksResult) -> None:
    for case, ranks in each(result):
        assert [rank["resumed"] for rank in ranks] == [rank["second half"] for rank in ranks], case


def test_full_rank_and_no_compression_are_the_mean(result: RanksResult) -> None:
    exact = {case: ranks[0]["is mean"] for case, ranks in each(result) if ranks[0]["is mean"] < RELATIVE_TOLERANCE}
    assert sorted({case.rpartition(", ")[0] for case in exact}) == ["powersgd, full rank", "powersgd, nothing pays"]


def test_compression_compresses(result: RanksResult) -> None:
    for case, ranks in each(result):
        if case.startswith(("powersgd, rank", "powersgd, cold", "dgc")):
            assert ranks[0]["is mean"] > 0.1, case


def test_gloo_rounds_every_partial_sum_of_bfloat16(result: RanksResult) -> None:
    for ranks in zip(*(rank.items() for rank in result.of_all("sums")), strict=True):
        for elements, found in ranks:
            assert found["as gloo"], f"{elements} elements"
            assert found["over bound"] <= 1.0, f"{elements} elements"
        assert len({found["bits"] for _, found in ranks}) == 1


def test_gloo_cannot_sum_float16(result: RanksResult) -> None:
    # When this fails, Paddle has learnt it: compression to float16 need not be refused on Gloo any more.
    assert all(np.isinf(rank).all() for rank in result.of_all("float16"))


@pytest.mark.long
def test_four_ranks_sum_bfloat16_in_the_same_way(tmp_path: Path) -> None:
    result = run_ranks(ROOT / "tests/parallel/compression_ranks.py", 4, folder=tmp_path, nodes=2, args=["[]"])
    assert all(found["as gloo"] for rank in result.of_all("sums") for found in rank.values())
