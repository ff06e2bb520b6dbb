"""A run that ends in the middle of an epoch, and of an update, on two ranks, and goes on on one or three."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

pytestmark = pytest.mark.long

SAMPLES = 50


def run(output: Path, world_size: int, ends_after: int = 0) -> RanksResult:
    nodes = 0 if world_size == 1 else world_size
    folder = output.parent / f"job{world_size}"
    args = [str(output), str(ends_after)]
    return run_ranks(ROOT / "tests/parallel/move_ranks.py", world_size, folder=folder, nodes=nodes, args=args)


def samples(result: RanksResult, epoch: int) -> list[int]:
    return [index for taken in result.of_all("taken") for index in taken.get(str(epoch), [])]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Where a run of two ranks has a checkpoint after 5 steps of 4 samples, and these samples."""
    output = tmp_path_factory.mktemp("moved") / "run"
    seen = samples(run(output, 2, ends_after=5), 0)
    assert len(set(seen)) == len(seen) == 20
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000005"]
    return output, seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_sample_of_the_epoch_is_lost_and_none_comes_twice(
    tmp_path: Path, ended: tuple[Path, list[int]], world_size: int
) -> None:
    shutil.copytree(ended[0], tmp_path / "run")
    result = run(tmp_path / "run", world_size)
    assert Counter([*ended[1], *samples(result, 0)]) == Counter(range(SAMPLES))
    # 50 samples do not divide by 3 ranks: one comes twice, to fill the last step.
    padding = -SAMPLES % world_size
    next_epoch = Counter(samples(result, 1))
    assert (set(next_epoch), sum(next_epoch.values())) == (set(range(SAMPLES)), SAMPLES + padding)
