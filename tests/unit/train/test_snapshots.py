"""Checkpoint folders: published whole or not at all, and refused when they are not as they were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet_train.convert import program_state
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage
from tests.support.checkpoints import publish, write_folder

ANOTHER = storage.Run(1, 9.0, "begun later")


def write(checkpoints: Path, step: int, content: str = "tensors") -> Path:
    return publish(checkpoints, step, {"epoch": step // 10, "step": step}, content=content.encode())


def test_published_checkpoint_gives_its_state_back(tmp_path: Path) -> None:
    folder = write(tmp_path, 20)
    assert folder.name == "step-00000020"
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", "persistables.safetensors"]
    assert storage.read(folder).state == {"epoch": 2, "step": 20}


def test_newest_comes_last_and_a_folder_without_marker_is_ignored(tmp_path: Path) -> None:
    for step in (20, 100, 30):
        write(tmp_path, step)
    (tmp_path / "step-00000200").mkdir()
    storage.begin(tmp_path, 300)
    assert [path.name for path in storage.complete(tmp_path)] == ["step-00000020", "step-00000030", "step-00000100"]


def test_what_has_trained_most_is_the_newest_also_where_more_ranks_count_fewer_steps(tmp_path: Path) -> None:
    for step, epoch, consumed in ((150, 10, 0), (253, 11, 0), (172, 11, 672), (180, 12, 0)):
        publish(tmp_path, step, {"epoch": epoch, "step": step, "consumed_samples": consumed})
    names = ["step-00000150", "step-00000253", "step-00000172", "step-00000180"]
    assert [path.name for path in storage.complete(tmp_path)] == names
    (tmp_path / "step-00000253" / "complete.json").write_text("{")  # behind those with lower names
    assert [path.name for path in storage.complete(tmp_path)] == [names[0], *names[2:], names[1]]
    storage.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000180", "step-00000253"]


def test_no_folder_means_no_checkpoints(tmp_path: Path) -> None:
    assert storage.complete(tmp_path / "nothing") == []


def test_draft_of_a_killed_run_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    (storage.begin(tmp_path, 20) / "half.safetensors").write_text("half")
    folder = write(tmp_path, 20)
    assert not (folder / "half.safetensors").exists()


def test_same_step_can_be_published_again(tmp_path: Path) -> None:
    write(tmp_path, 20, "first")
    folder = write(tmp_path, 20, "second")
    assert (folder / "persistables.safetensors").read_bytes().endswith(b"second")
    storage.prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


def test_prune_keeps_the_newest_and_removes_what_killed_runs_left(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    storage.begin(tmp_path, 40)
    storage.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_what_users_put_beside_the_checkpoints_is_neither_read_nor_removed(tmp_path: Path) -> None:
    write(tmp_path, 10).rename(tmp_path / "step-00000900-before-the-change")
    (tmp_path / "step-by-step.txt").touch()
    for step in (20, 30):
        write(tmp_path, step)
    assert [path.name for path in storage.complete(tmp_path)] == ["step-00000020", "step-00000030"]
    storage.prune(tmp_path, keep=1)
    users = ["step-00000900-before-the-change", "step-by-step.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", *users]
    storage.remove_others(tmp_path, ANOTHER)
    assert sorted(path.name for path in tmp_path.iterdir()) == users


def test_a_step_of_nine_digits_is_newer_than_one_of_eight(tmp_path: Path) -> None:
    for step in (100_000_000, 99_999_999):
        write(tmp_path, step)
    assert [path.name for path in storage.complete(tmp_path)] == ["step-99999999", "step-100000000"]


def test_a_link_among_the_checkpoints_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    elsewhere, checkpoints = tmp_path / "elsewhere", tmp_path / "checkpoints"
    checkpoints.mkdir()
    for step in (10, 40):
        write(elsewhere, step)
        (checkpoints / f"step-{step:08d}").symlink_to(elsewhere / f"step-{step:08d}")
    (checkpoints / "step-00000050").symlink_to(elsewhere / "nowhere")
    write(checkpoints, 50)
    storage.prune(checkpoints, keep=2)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000040", "step-00000050"]
    storage.remove_others(checkpoints, ANOTHER)
    assert list(checkpoints.iterdir()) == []
    assert [path.name for path in storage.complete(elsewhere)] == ["step-00000010", "step-00000040"]


def test_what_killed_runs_left_is_removed_with_an_overwritten_run(tmp_path: Path) -> None:
    write(tmp_path, 10).rename(tmp_path / ".replaced-step-00000010")
    write(tmp_path, 20).rename(tmp_path / ".removing-step-00000020")
    write(tmp_path, 20)
    storage.begin(tmp_path, 30)
    for name in (".copying-step-00000040", ".removing-copying-step-00000040", ".removing-writing-step-00000040"):
        (tmp_path / name).mkdir()
    storage.remove_others(tmp_path, ANOTHER)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_that_a_killed_process_left_does_not_count(tmp_path: Path) -> None:
    """It has trained for longer: neither is it the newest, nor does it cost the later run its checkpoints."""
    for step, run in (
        (500, storage.Run(1, 9.0, "old")),
        (10, storage.Run(2, 5.0, "new")),
        (20, storage.Run(2, 5.0, "new")),
    ):
        publish(tmp_path, step, {"step": step}, score=float(step), run=run)
    assert [path.name for path in storage.of_latest_run(tmp_path)] == ["step-00000010", "step-00000020"]
    assert storage.best(tmp_path) == storage.folder_of(tmp_path, 20)
    storage.prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020"]


def test_clearing_leaves_the_record_of_the_run_and_what_was_moved_aside(tmp_path: Path) -> None:
    for step, why in ((10, "damaged"), (20, "of-run-aa")):
        storage.move_aside(write(tmp_path, step), why)
    (tmp_path / storage.RECORD).write_text("{}")
    own = publish(tmp_path, 30, {"step": 30}, run=ANOTHER)
    storage.remove_others(tmp_path, ANOTHER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "of-run-aa", "run.json", own.name]


def test_none_of_the_old_checkpoints_counts_when_clearing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Path) -> None:
        raise OSError(16, "Device or resource busy")

    for step in (10, 20):
        write(tmp_path, step)
    monkeypatch.setattr(storage.shutil, "rmtree", fails)
    with pytest.raises(CheckpointError, match="busy"):
        storage.remove_others(tmp_path, ANOTHER)
    assert storage.complete(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b'"epoch": 2', b'"epoch": 3', r"complete\.json was altered after it was written"),
        (b'"sha256"', b'"sha257"', r"complete\.json was altered after it was written"),
        (b'"step": 20', b'"step": ', r"complete\.json is damaged: Expecting value"),
    ],
)
def test_cut_off_or_altered_state_is_named(tmp_path: Path, old: bytes, new: bytes, problem: str) -> None:
    marker = write(tmp_path, 20) / "complete.json"
    marker.write_bytes(marker.read_bytes().replace(old, new))
    with pytest.raises(CheckpointError, match=problem):
        storage.read(marker.parent)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, 20)
    (folder / "persistables.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"persistables\.safetensors is missing"):
        storage.read(folder)


def test_a_saved_state_without_a_training_is_no_checkpoint(tmp_path: Path) -> None:
    write_folder(tmp_path / "step-00000020", program_state.State({"w": np.zeros(2)}))
    with pytest.raises(CheckpointError, match="it has no state of a training"):
        storage.read(tmp_path / "step-00000020")


def test_format_of_a_later_version_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 20)
    (folder / "complete.json").write_text('{"format": 99, "files": {}}')
    with pytest.raises(CheckpointError, match="format 99; this version reads formats 2 and 3"):
        storage.read(folder)
