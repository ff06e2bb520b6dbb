"""A run that stops in the middle of an epoch, or of an update, on two ranks, and resumes on one or three."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

pytestmark = pytest.mark.long

SAMPLES = 50


def run(output: Path, world_size: int, ends: str = "never", machines: str = "") -> RanksResult:
    nodes = 0 if world_size == 1 else world_size
    folder = output.parent / f"job{world_size}{machines}"
    args = [str(output), ends, *([machines] if machines else [])]
    return run_ranks(ROOT / "tests/parallel/move_ranks.py", world_size, folder=folder, nodes=nodes, args=args)


def samples(result: RanksResult, epoch: int) -> list[int]:
    return [index for taken in result.of_all("taken") for index in taken.get(str(epoch), [])]


@pytest.fixture(scope="module", params=["step", "epoch"])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A run of two ranks with a checkpoint after 1 step (4 batches of 4 samples) or 13 batches, and its samples."""
    output = tmp_path_factory.mktemp("moved") / "run"
    seen = samples(run(output, 2, request.param), 0)
    count, name = {"step": (16, "step-00000001"), "epoch": (SAMPLES, "step-00000003")}[request.param]
    assert len(set(seen)) == len(seen) == count
    assert [path.name for path in (output / "checkpoints").glob("*step-*")] == [name]
    return output, seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_sample_of_the_epoch_is_lost_and_none_comes_twice(
    tmp_path: Path, ended: tuple[Path, list[int]], world_size: int
) -> None:
    shutil.copytree(ended[0], tmp_path / "run")
    result = run(tmp_path / "run", world_size)
    # What does not divide by 3 ranks is filled with samples that come once more.
    left = SAMPLES - len(ended[1])
    first, second = Counter([*ended[1], *samples(result, 0)]), Counter(samples(result, 1))
    assert (set(first), sum(first.values())) == (set(range(SAMPLES)), SAMPLES + -left % world_size)
    assert (set(second), sum(second.values())) == (set(range(SAMPLES)), SAMPLES + -SAMPLES % world_size)


def test_machines_with_lists_of_their_own_continue_them_without_a_lost_one_and_with_it_again(tmp_path: Path) -> None:
    taken: dict[str, list[int]] = {machine: [] for machine in "012"}
    later: dict[str, list[int]] = {}
    for machines, ends in (("012", "step"), ("12", "step"), ("120", "never")):
        told = run(tmp_path / "run", len(machines), ends, machines).of_all("taken")
        for machine, epochs in zip(machines, told, strict=True):
            taken[machine] += epochs["0"]
            later[machine] = epochs.get("1", [])
    assert [Counter(taken[machine]) for machine in "12"] == [Counter(range(SAMPLES))] * 2
    # It has read one step of 4 x 2 samples with the others and, of what was left to it, as much as the others had.
    assert len(set(taken["0"])) == len(taken["0"]) == SAMPLES - 8
    assert [Counter(samples) for samples in later.values()] == [Counter(range(SAMPLES))] * 3
