"""Loaders, datasets and metrics of old scripts, and empty strategies: several ranks against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

SCRIPT = ROOT / "tests/parallel/old_loaders.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return run_ranks(SCRIPT, 1, folder=folder, args=[str(folder)]).values[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    folder = tmp_path_factory.mktemp("two")
    (folder / "apart.yaml").write_text("use_local_sgd: true\nlocal_sgd_is_warm_steps: 0\nlocal_sgd_steps: 4\n")
    return run_ranks(
        SCRIPT, 2, folder=folder, args=[str(folder)], env={"FLEET_TRAIN_STRATEGY": str(folder / "apart.yaml")}
    )


@pytest.mark.parametrize("case", ["reader", "queue", "memory"])
def test_old_loader_trains_as_one_process_with_the_joint_batches(
    case: str, two: RanksResult, alone: dict[str, Any]
) -> None:
    first, second = two.of_all(case)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone[case], rtol=1e-4, atol=1e-5)
    # Three steps and a pass of the reader, two passes of the datasets: they saw the same samples, or different ones.
    np.testing.assert_allclose(alone["queue"], alone["memory"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(alone["reader"], alone["queue"], rtol=1e-2)


def test_a_pass_of_the_reader_has_all_batches(two: RanksResult, alone: dict[str, Any]) -> None:
    assert two.of_all("reader_steps") == [20, 20]
    assert alone["reader_steps"] == 20


def test_size_in_memory_is_that_of_all_ranks(two: RanksResult, alone: dict[str, Any]) -> None:
    assert [alone["samples"], *two.of_all("samples")] == [480, 480, 480]


def test_values_are_printed_every_period_with_their_name(two: RanksResult) -> None:
    for rank in two.ranks:
        assert rank.output.count("batch 8, loss: ") == rank.output.count("batch 16, loss: ") == 4


def test_ranks_make_the_steps_of_the_rank_with_the_fewest_batches(two: RanksResult) -> None:
    first, second = two.of_all("uneven")
    np.testing.assert_array_equal(first, second)
    said = "stopped after 10 steps, when rank 1 had no batch left; further batches of rank 0 are left out"
    assert [said in rank.output for rank in two.ranks] == [True, False]
    assert two.ranks[0].output.count("thread_num=4 is mapped") == 1
    for message in two.of_all("no_samples"):
        assert message == "train_from_dataset: rank 1 has no samples; give each rank about as many samples"


def test_a_strategy_in_which_nothing_was_set_takes_the_launchers(two: RanksResult) -> None:
    """LocalSGD keeps the ranks apart after a step; the launcher's flag wins over what was set, and rank 0 says so."""
    for case, expected in {
        "ours": [True, "auto"],
        "stock": [True, "auto"],
        "none": [True, "auto"],
        "set": [True, "auto"],
        "stock_set": [True, "auto"],
    }.items():
        assert two.of_all(f"strategy_{case}") == [expected, expected], case
    first, second = (rank.output for rank in two.ranks)
    assert "nothing was set in the script's strategy: profile 'apart' is used" in first
    for asked in ("8", "4096"):
        assert f"wins over the script: fuse_grad_size_in_MB is auto, not {asked}" in first
    assert "nothing was set" not in second


@pytest.mark.parametrize("world", [2, 3])
def test_metrics_are_those_of_all_samples(world: int, two: RanksResult, tmp_path: Path) -> None:
    result = two if world == 2 else run_ranks(SCRIPT, 3, folder=tmp_path, args=[str(tmp_path), "only_metrics"])
    ranks = range(world)
    scores, labels = np.concatenate(result.of_all("scores")), np.concatenate(result.of_all("labels"))
    bucket = (scores * 255).astype(int)
    above, level = (relation(bucket[labels == 1][:, None], bucket[labels == 0]).mean() for relation in _RELATIONS)
    assert result.of_all("auc") == result.of_all("auc_of_rows") == [pytest.approx(above + level / 2, abs=1e-12)] * world
    assert result.of_all("acc") == [sum(2**24 - 1 - rank for rank in ranks) / (world * (2**25 + 1))] * world
    assert result.of_all("mae") == [pytest.approx(sum(1.5 + rank for rank in ranks) / (4 * world))] * world
    mean = sum(8 + rank for rank in ranks) / (2 * world)
    assert result.of_all("mse") == [pytest.approx(mean)] * world
    assert result.of_all("rmse") == [pytest.approx(mean**0.5)] * world
    for rank in ranks:
        found = result.values[rank]
        np.testing.assert_array_equal(found["sum"], np.array([[world, sum(ranks)]], "int64"), strict=True)
        np.testing.assert_array_equal(found["max"], np.array([world - 1, 0], "float32"), strict=True)
        np.testing.assert_array_equal(found["min"], np.array([0, 1 - world], "float32"), strict=True)
        assert found["one_kind"] == 0.5
        assert found["none"] == "fleet.metrics.acc: the number of samples is 0 on all ranks"
        assert "there is no variable 'no_such_variable'; fetch the value" in found["unknown"]


_RELATIONS = (np.greater, np.equal)
