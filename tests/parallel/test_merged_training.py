"""The trainer under gradient merge counts updates: two ranks against one process with the joint batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

SCRIPT = ROOT / "tests/parallel/merged_training.py"
BATCH = 4


def run(folder: Path, merged: int, samples: int, batch: int, world_size: int) -> list[dict[str, Any]]:
    folder.mkdir()
    args = [*map(str, (merged, samples, batch)), str(folder / "saved")]
    nodes = 0 if world_size == 1 else world_size
    result = run_ranks(SCRIPT, world_size, folder=folder, nodes=nodes, args=args)
    return [{name: result.of_all(name)[rank] for name in ("joint", "straight", "parts")} for rank in range(world_size)]


@pytest.mark.parametrize("merged", [pytest.param(2, marks=pytest.mark.long), 3])
def test_merged_micro_batches_on_two_ranks_are_one_process_with_the_joint_batch(tmp_path: Path, merged: int) -> None:
    samples = 2 * merged * BATCH * 6
    ranks = run(tmp_path / "ranks", merged, samples, BATCH, 2)
    (alone,) = run(tmp_path / "alone", 1, samples, 2 * merged * BATCH, 1)
    for found, expected in zip(ranks[0]["joint"], alone["joint"], strict=True):
        assert found["steps"] == expected["steps"] == 18
        assert found["samples"] == expected["samples"] == 3 * samples
        assert found["place"] == [18, 18 * merged, 0]
        assert [step for step, _ in found["rates"]] == list(range(1, 19))
        assert found["rates"] == expected["rates"]
        assert [step for step, _ in found["norms"]] == list(range(1, 19))
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)
        for one, other in zip(found["parameters"], expected["parameters"], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("merged", [2, 3])
def test_a_resume_gives_the_same_bits_also_where_an_update_goes_over_the_end_of_an_epoch(
    tmp_path: Path, merged: int
) -> None:
    batches = 7  # of each rank in an epoch: no multiple of 2 or 3
    for rank in run(tmp_path / "ranks", merged, 2 * BATCH * batches, BATCH, 2):
        straight, parts = rank["straight"], rank["parts"]
        assert straight["steps"] == 3 * batches // merged
        assert [part["place"] for part in parts] == [
            [n * batches // merged, n * batches, n * batches % merged] for n in (1, 2, 3)
        ]
        assert parts[-1]["state"] == straight["state"]
        assert [one for part in parts for one in part["losses"]] == straight["losses"]
        assert [one for part in parts for one in part["norms"]] == straight["norms"]
        assert [one for part in parts for one in part["rates"]] == straight["rates"]
