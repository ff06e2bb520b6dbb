"""Checkpoint folders: published whole or not at all, and refused when they are not as they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_train.errors import CheckpointError
from fleet_train.train import snapshots


def write(checkpoints: Path, step: int, content: str = "tensors") -> Path:
    draft = snapshots.begin(checkpoints, step)
    (draft / "persistables.safetensors").write_text(content)
    return snapshots.publish(checkpoints, step, {"epoch": step // 10, "step": step})


def test_published_checkpoint_gives_its_state_back(tmp_path: Path) -> None:
    folder = write(tmp_path, 20)
    assert folder.name == "step-00000020"
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", "persistables.safetensors", "state.json"]
    assert snapshots.read_state(folder) == {"epoch": 2, "step": 20}


def test_newest_comes_last_and_a_folder_without_marker_is_ignored(tmp_path: Path) -> None:
    for step in (20, 100, 30):
        write(tmp_path, step)
    (tmp_path / "step-00000200").mkdir()
    snapshots.begin(tmp_path, 300)
    assert [path.name for path in snapshots.complete(tmp_path)] == ["step-00000020", "step-00000030", "step-00000100"]


def test_no_folder_means_no_checkpoints(tmp_path: Path) -> None:
    assert snapshots.complete(tmp_path / "nothing") == []


def test_draft_of_a_killed_run_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    (snapshots.begin(tmp_path, 20) / "half.safetensors").write_text("half")
    folder = write(tmp_path, 20)
    assert not (folder / "half.safetensors").exists()


def test_same_step_can_be_published_again(tmp_path: Path) -> None:
    write(tmp_path, 20, "first")
    folder = write(tmp_path, 20, "second")
    assert (folder / "persistables.safetensors").read_text() == "second"
    snapshots.prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


def test_prune_keeps_the_newest_and_removes_what_killed_runs_left(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    snapshots.begin(tmp_path, 40)
    snapshots.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize("content", ['{"epoch": 2,', '{"epoch": 3, "step": 20}'])
def test_cut_off_or_altered_state_is_named(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, 20)
    (folder / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"state\.json was altered"):
        snapshots.read_state(folder)


@pytest.mark.parametrize("name", ["state.json", "persistables.safetensors"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, 20)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        snapshots.read_state(folder)


def test_format_of_a_later_version_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 20)
    (folder / "complete.json").write_text('{"format": 99, "files": {}}')
    with pytest.raises(CheckpointError, match="format 99; this version reads format 2"):
        snapshots.read_state(folder)
