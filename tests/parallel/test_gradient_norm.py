"""The norm of the gradient on two ranks is that of one process with the joint batch, and reading it changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel.gradient_norm import CASES, CLIP, SEEDS, UPDATES
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, late_streams: bool) -> RanksResult:
    folder = tmp_path_factory.mktemp("gradient_norm")
    script = ROOT / "tests/parallel/gradient_norm.py"
    return run_ranks(script, 2, folder=folder, nodes=2, timeout_seconds=200, late_streams=late_streams)


def of_ranks(ended: RanksResult, name: str) -> list[list[dict[str, Any]]]:
    """By seed, then by rank."""
    return [[rank[name][index] for rank in ended.of_all("cases")] for index in range(len(SEEDS))]


@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_one_process_with_the_joint_batch_before_clipping(ended: RanksResult, name: str) -> None:
    for ranks in of_ranks(ended, name):
        found, expected = ranks[0]["found"], np.array(ranks[0]["expected"])
        np.testing.assert_array_equal(ranks[1]["found"], found)
        usable = np.isfinite(expected)
        assert np.isfinite(found).tolist() == usable.tolist()
        assert usable.sum() == len(expected) - CASES[name].overflows
        assert (expected[usable] > CLIP).sum() == UPDATES - CASES[name].overflows
        tolerance = 1e-2 if name == "bfloat16" else 1e-5
        np.testing.assert_allclose(np.array(found)[usable], expected[usable], rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_the_run_has_the_same_bits_with_it_and_without(ended: RanksResult, name: str) -> None:
    for ranks in of_ranks(ended, name):
        for rank in ranks:
            assert rank["moved"]
            assert rank["bits"][0] == rank["bits"][1]


def test_no_bucket_is_waited_for_earlier(ended: RanksResult) -> None:
    for ranks in of_ranks(ended, "plain"):
        with_norm, without = ranks[0]["order"]
        assert with_norm == without == "wu" * 4


def test_the_sums_of_the_clip_are_taken_where_it_makes_them_in_every_step(ended: RanksResult) -> None:
    added = {name: of_ranks(ended, name)[0][0]["squares"] for name in CASES}
    assert added["clipped"] == added["averaged weights"] == [4, 4]
    assert added["plain"] == added["skipping"] == [4, 0]


def test_local_sgd_refuses_it_and_says_why(ended: RanksResult) -> None:
    for said in ended.of_all("refused"):
        assert "local steps average no gradient" in said


def test_the_reference_trainer_records_it_when_asked_and_with_a_clip(ended: RanksResult) -> None:
    for records in ended.of_all("records"):
        assert "leave one of the two out" in records.pop("--gradient_norm, LocalSGD")
        assert records == {
            "nothing asked": False,
            "--gradient_norm": True,
            "--clip_norm": True,
            "--clip_norm, LocalSGD": False,
        }
