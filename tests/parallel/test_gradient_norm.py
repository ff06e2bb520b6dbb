"""The gradient norm on two ranks is that of one process with the joint batch, and reading it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.parallel.gradient_norm import CASES, CLIP, SEEDS, UPDATES
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

FEW = ("plain", "clipped", "merged", "scaled")
REST = tuple(name for name in CASES if name not in FEW)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((FEW, False), id="threads"),
        pytest.param((REST, False), id="more", marks=pytest.mark.long),
        pytest.param((tuple(CASES), True), id="streams", marks=pytest.mark.long),
    ],
)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    names, late_streams = request.param
    folder = tmp_path_factory.mktemp("gradient_norm")
    script = ROOT / "tests/parallel/gradient_norm.py"
    return run_ranks(script, 2, folder=folder, nodes=2, args=names, timeout_seconds=200, late_streams=late_streams)


def cases(ended: RanksResult) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Name of the case, and its results by rank, for each case and seed."""
    of_rank = ended.of_all("cases")
    for name in of_rank[0]:
        for index in range(len(SEEDS)):
            yield name, [found[name][index] for found in of_rank]


def test_it_is_that_of_one_process_with_the_joint_batch_before_clipping(ended: RanksResult) -> None:
    for name, ranks in cases(ended):
        found, expected = ranks[0]["found"], np.array(ranks[0]["expected"])
        np.testing.assert_array_equal(ranks[1]["found"], found)
        usable = np.isfinite(expected)
        assert np.isfinite(found).tolist() == usable.tolist(), name
        assert (expected[usable] > CLIP).sum() == UPDATES - CASES[name].overflows, name
        tolerance = {"bfloat16": 1e-2, "PowerSGD": 1e-4, "DGC": 1e-4, "int8": 1e-4}.get(name, 1e-5)
        np.testing.assert_allclose(np.array(found)[usable], expected[usable], rtol=tolerance, err_msg=name)


def test_the_run_has_the_same_bits_with_it_and_without(ended: RanksResult) -> None:
    for name, ranks in cases(ended):
        for rank in ranks:
            assert rank["moved"], name
            assert rank["bits"][0] == rank["bits"][1], name


def test_no_bucket_is_waited_for_earlier(ended: RanksResult) -> None:
    for name, ranks in cases(ended):
        with_norm, without = ranks[0]["order"]
        assert with_norm == without, name
        assert without == "wu" * 4 or name != "plain"


def test_the_sums_of_the_clip_are_taken_where_it_makes_them_in_every_step(ended: RanksResult) -> None:
    expected = {name: [4, 4] for name in ("clipped", "averaged weights", "bfloat16")}
    expected |= {name: [4, 0] for name in ("plain", "skipping", "scaled", "PowerSGD", "DGC", "int8")}
    for name, ranks in cases(ended):
        assert ranks[0]["squares"] == expected.get(name, [0, 0]), name


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
