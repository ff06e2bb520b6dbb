"""Checkpoints of a run on one process: what is kept, what is best, and what happens when the disk is in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest

from fleet_train import fleet
from fleet_train.train import snapshots
from fleet_train.train.checkpoint import Checkpoints, TrainState


@pytest.fixture(autouse=True)
def program(small_loss: Any) -> None:
    """A job of one process with a trained program in a scope of its own."""
    fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1)).minimize(small_loss)
    paddle.static.Executor().run(fleet.startup_program)


def state(step: int) -> TrainState:
    return TrainState(1, step, 10, 1, {}, {}, {}, {}, consumed_samples=7 * step)


def kept(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_newest_and_best_are_kept(tmp_path: Path, background: bool) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=True, background=background)
    for step, score in ((10, 0.5), (20, 0.9), (30, 0.8), (40, float("nan")), (50, None)):
        checkpoints.save(None, state(step), score)
    assert checkpoints.finish() == checkpoints.folder / "step-00000050"
    assert kept(checkpoints) == ["step-00000020", "step-00000040", "step-00000050"]
    newest, best = checkpoints.newest(), checkpoints.best()
    assert newest is not None
    assert best is not None
    assert (newest.folder.name, newest.state, newest.score) == ("step-00000050", state(50), None)
    assert (best.folder.name, best.state.consumed_samples, best.score) == ("step-00000020", 140, 0.9)


@pytest.mark.parametrize("background", [False, True])
def test_disk_that_cannot_take_it_is_said_once_and_leaves_the_one_before(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, background=background, say=said.append)
    assert checkpoints.save(None, state(10)) == checkpoints.finish(), said
    monkeypatch.setattr(snapshots, "begin", fails)
    checkpoints.save(None, state(20))
    assert checkpoints.finish() is None
    assert checkpoints.finish() is None
    assert len(said) == 1
    assert said[0].startswith("the checkpoint of step 20 could not be written: ")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.folder.name == "step-00000010"
    monkeypatch.undo()
    monkeypatch.setattr(snapshots, "prune", fails)
    checkpoints.save(None, state(30))
    assert checkpoints.finish() == checkpoints.folder / "step-00000030"
    assert said[1].startswith("the checkpoint of step 30 is written, but older ones could not be removed: ")
    monkeypatch.undo()
    checkpoints.save(None, state(40))
    assert checkpoints.finish() == checkpoints.folder / "step-00000040"
    assert (kept(checkpoints), len(said)) == (["step-00000030", "step-00000040"], 2)
