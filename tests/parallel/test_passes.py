"""Passes that communicate: several ranks train like one process with the joint batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

RELATIVE_TOLERANCE = 1e-5


def cases_of_ranks(tmp_path: Path, world_size: int, case: str, **options: Any) -> list[dict[str, Any]]:
    result = run_ranks(ROOT / "tests/parallel/passes_ranks.py", world_size, folder=tmp_path, args=[case], **options)
    return result.of_all("cases")


@pytest.mark.parametrize(
    ("world_size", "late_streams"),
    [(2, False), pytest.param(3, False, marks=pytest.mark.long), pytest.param(2, True, marks=pytest.mark.long)],
)
def test_synchronized_batch_norm_equals_the_joint_batch(tmp_path: Path, world_size: int, late_streams: bool) -> None:
    """On the executor's own threads: only the chain of tokens keeps the exchanges of the two branches in order."""
    env = {"FLAGS_new_executor_serial_run": "0"}
    ranks = cases_of_ranks(tmp_path, world_size, "synchronized", env=env, late_streams=late_streams)
    for case, first in ranks[0].items():
        assert first["moved"] > 1e-2, case
        assert first["difference"] < RELATIVE_TOLERANCE, case
        assert [rank[case]["state"] for rank in ranks] == [first["state"]] * world_size, f"{case}: replicas differ"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_each_value_of_uneven_batches_counts_once(tmp_path: Path, world_size: int) -> None:
    ranks = cases_of_ranks(tmp_path, world_size, "uneven")
    for case, first in ranks[0].items():
        assert first["moved"] > 1e-2, case
        assert first["difference"] < RELATIVE_TOLERANCE, case
        assert [rank[case]["state"] for rank in ranks] == [first["state"]] * world_size, f"{case}: replicas differ"


@pytest.mark.long
def test_more_ranks_than_gather_sum_alike(tmp_path: Path) -> None:
    """Sums travel by allgather among few ranks, by allreduce among more."""
    ranks = cases_of_ranks(tmp_path, 5, "shortcut")
    for case, first in ranks[0].items():
        assert first["difference"] < RELATIVE_TOLERANCE, case
        assert [rank[case]["state"] for rank in ranks] == [first["state"]] * 5, f"{case}: replicas differ"


@pytest.mark.long
def test_local_batch_norm_does_not(tmp_path: Path) -> None:
    """The test above would see it if nothing was exchanged."""
    ranks = cases_of_ranks(tmp_path, 2, "local")
    assert ranks[0]["fused"]["parameter_difference"] > 1e-2


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_merged_micro_batches_of_all_ranks_equal_the_joint_batch(tmp_path: Path, world_size: int) -> None:
    ranks = cases_of_ranks(tmp_path, world_size, "merged")
    for case, first in ranks[0].items():
        assert first["moved"] > 1e-2, case
        assert first["difference"] < RELATIVE_TOLERANCE, case
        assert [rank[case]["state"] for rank in ranks] == [first["state"]] * world_size, f"{case}: replicas differ"


def test_overflow_on_one_rank_skips_the_update_on_all(tmp_path: Path, late_streams: bool) -> None:
    ranks = cases_of_ranks(tmp_path, 2, "overflow", late_streams=late_streams)
    for rank in ranks:
        assert rank["scales"] == [32768, 32768, 16384, 16384, 16384]
        assert rank["changed"][1] == ["loss_scaling_0", "loss_scaling_good_steps_0"]
        assert all("linear_0.w_0" in rank["changed"][step] for step in (0, 2, 3))
        assert rank["state"] == ranks[0]["state"]


@pytest.mark.long
def test_low_precision_keeps_replicas_equal(tmp_path: Path) -> None:
    ranks = cases_of_ranks(tmp_path, 2, "lowered")
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert all(rank["last"] < 0.8 * rank["first"] for rank in ranks)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_all_passes_together_equal_one_process(tmp_path: Path, world_size: int) -> None:
    ranks = cases_of_ranks(tmp_path, world_size, "together", env={"FLAGS_new_executor_serial_run": "0"})
    for case, first in ranks[0].items():
        assert first["moved"] > 1e-2, case
        assert first["difference"] < RELATIVE_TOLERANCE, case
        assert [rank[case]["state"] for rank in ranks] == [first["state"]] * world_size, f"{case}: replicas differ"
