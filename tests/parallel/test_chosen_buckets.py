"""Bucket sizes chosen by real ranks: measured, agreed on, and averages are correct."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

Ranks = list[dict[str, Any]]
OPEN = ["open", "size given", "bfloat16"]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("chosen_buckets")
    script = ROOT / "tests/parallel/chosen_buckets.py"
    cases: Ranks = run_ranks(script, request.param, folder=folder, nodes=2, timeout_seconds=150).of_all("cases")
    return cases


@pytest.mark.parametrize("name", OPEN)
def test_all_ranks_carry_out_the_same_choice(ranks: Ranks, name: str) -> None:
    assert len({rank[name]["plan"] for rank in ranks}) == 1
    assert len({rank[name]["weights"] for rank in ranks}) == 1
    knobs = ["nccl_comm_num", "fuse_grad_size_in_MB", "last_comm_group_size_MB"]
    if name == "size given":
        knobs.remove("fuse_grad_size_in_MB")
    assert re.findall(r"(\w+): [0-9.]+", ranks[0][name]["chosen"]) == knobs


@pytest.mark.parametrize("name", ["open", "size given"])
def test_rank_0_says_what_was_chosen_and_why(ranks: Ranks, name: str) -> None:
    (sentence,) = ranks[0][name]["said"]
    found = ranks[0][name]
    assert sentence.startswith(f"fleet_train: {found['chosen']}: chosen for ")
    assert re.search(
        r"chosen for [0-9.e+]+ Gb/s, [0-9.e-]+ ms \(measured\) and 2.44 MB of gradients, which makes", sentence
    )
    assert f"{found['buckets']} bucket" in sentence
    assert all(rank[name]["said"] == [] for rank in ranks[1:])
    assert "(measured))" in found["explained"]


@pytest.mark.parametrize("name", [*OPEN, "all given"])
def test_averages_are_exact(ranks: Ranks, name: str) -> None:
    # float32's own rounding of a third, twice; bfloat16 sums whole numbers exactly.
    assert all(rank[name]["error"] < 1e-5 for rank in ranks)


def test_given_sizes_are_used_without_a_message(ranks: Ranks) -> None:
    assert [(rank["all given"]["chosen"], rank["all given"]["said"]) for rank in ranks] == [("", [])] * len(ranks)
    # 0.49 MB each: two in a bucket of 1 MB, the first and last alone.
    assert all(rank["all given"]["buckets"] == 4 for rank in ranks)
    assert all(rank["size given"]["buckets"] == 5 for rank in ranks)
