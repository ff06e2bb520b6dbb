"""Runs whose folder, or parts of it, are links: users put checkpoints on another disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest

from fleet_train import fleet
from fleet_train.errors import CheckpointError
from fleet_train.train import reference
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from fleet_train.train.config import TrainConfig
from fleet_train.train.metrics import AppendOnlyFile, open_sinks
from fleet_train.train.reference import publish_summary
from tests.support.checkpoints import publish


@pytest.fixture(autouse=True)
def job(small_loss: Any) -> None:
    """A job of one process with something to save."""
    fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1)).minimize(small_loss)
    paddle.static.Executor().run(fleet.startup_program)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose checkpoints, with two of an earlier run, are on another disk."""
    for step in (100, 200):
        write(tmp_path / "disk", step)
    (tmp_path / "disk" / "notes.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    return tmp_path / "run"


def write(checkpoints: Path, step: int) -> None:
    publish(checkpoints, step, {"step": step})


def start(output: Path, checkpoints: Checkpoints | None = None, **flags: Any) -> Any:
    return reference.start_or_resume(TrainConfig(output_dir=str(output), **flags), checkpoints or Checkpoints(output))


@pytest.mark.parametrize("by_link", [False, True])
def test_overwriting_removes_the_old_run_behind_the_link_and_the_new_one_is_found(
    tmp_path: Path, run: Path, by_link: bool
) -> None:
    if by_link:
        (tmp_path / "link").symlink_to(run)
        run = tmp_path / "link"
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
        start(run)
    checkpoints = Checkpoints(run)
    assert start(run, checkpoints, overwrite=True) is None
    assert len(storage.complete(tmp_path / "disk")) == 2, "until the new run has a checkpoint"
    checkpoints.save(None, TrainState(1, 10, 10, 1, {}, {}, {}, {}))
    assert sorted(path.name for path in (tmp_path / "disk").glob("[!.]*")) == ["notes.txt", "step-00000010"]
    assert os.readlink(run / "checkpoints") == str(tmp_path / "disk")
    assert [path.name for path in storage.complete(tmp_path / "disk")] == ["step-00000010"]


def test_a_checkpoint_that_cannot_be_removed_ends_the_job(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "step-00000100")

    checkpoints = Checkpoints(run)
    start(run, checkpoints, overwrite=True)
    monkeypatch.setattr(storage, "_marked_for_removal", fails)
    with pytest.raises(CheckpointError, match=r"an earlier run in .* cannot be removed: .*Permission denied: 'step-0"):
        checkpoints.save(None, TrainState(1, 10, 10, 1, {}, {}, {}, {}))


def to_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("away"))


def to_a_file(path: Path) -> None:
    path.with_name("file").touch()
    path.symlink_to(path.with_name("file"))


def test_a_folder_that_another_rank_makes_meanwhile_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, exists = tmp_path / "checkpoints", os.path.lexists

    def made_meanwhile(path: Path) -> bool:
        path.mkdir(exist_ok=True)
        return exists(path)

    monkeypatch.setattr(os.path, "lexists", made_meanwhile)
    storage.refuse_no_folder(folder)
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (to_nowhere, "is a link to .*away, which is not a folder: .*; mount its disk, make that folder, or remove"),
        (to_a_file, "is a link to .*file, which is not a folder"),
        (Path.touch, "is not a folder; move it away"),
    ],
)
@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}], ids=["new", "resume", "overwrite"])
@pytest.mark.parametrize("where", ["", "run", "run/checkpoints"])
def test_what_is_no_folder_is_refused_before_anything_is_trained(
    tmp_path: Path, make: Callable[[Path], None], said: str, flags: dict[str, Any], where: str
) -> None:
    if where.endswith("checkpoints"):
        (tmp_path / "disk" / "run").mkdir(parents=True)
    elif where:
        (tmp_path / "disk").mkdir()
    make(tmp_path / "disk" / where)
    with pytest.raises(CheckpointError, match=said):
        start(tmp_path / "disk" / "run", **flags)


def test_a_linked_file_is_written_where_it_leads(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    disk.mkdir()
    (disk / "old.jsonl").write_text("{}\n")
    (run / "metrics.jsonl").symlink_to("../disk/old.jsonl")
    (run / "summary.json").symlink_to(disk / "summary.json")
    (disk / "curves").mkdir()
    (run / "visualdl").symlink_to(disk / "curves")
    sinks = open_sinks(run, reporting=True)
    sinks.write(1, {"train/loss": 0.5})
    sinks.close()
    publish_summary(run, {"steps": 1})
    assert all((run / name).is_symlink() for name in ("metrics.jsonl", "summary.json", "visualdl"))
    assert '"train/loss": 0.5' in (disk / "old.jsonl").read_text()
    assert (disk / "summary.json").read_text() == '{\n  "steps": 1\n}\n'
    assert sorted(path.name for path in disk.iterdir()) == ["curves", "old.jsonl", "summary.json"]
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "summary.json", "visualdl"]


def test_a_link_that_somebody_else_has_made_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "summary.json").symlink_to(precious)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    publish_summary(tmp_path, {"steps": 1})
    assert precious.read_text() == "mine"
    assert (tmp_path / "summary.json").read_text() == '{\n  "steps": 1\n}\n'
    assert not (tmp_path / "summary.json").is_symlink()


def test_what_is_no_file_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "pipe")
    file = AppendOnlyFile(tmp_path / "metrics.jsonl")
    file.append(b"{}\n")
    file.close()
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def no_second_names(*_: object) -> None:
    raise OSError(1, "Operation not permitted")


def logs(output: Path) -> dict[str, str]:
    return {
        path.name: path.read_text(errors="replace")
        for path in output.rglob("*")
        if path.suffix in (".jsonl", ".log", ".png")
    }


@pytest.mark.parametrize("linked", [False, True])
def test_logs_of_a_replaced_run_stay_until_the_new_one_has_a_checkpoint(
    tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, disk = tmp_path / "out", tmp_path / "disk"
    for folder in (output / "images", output / "visualdl", disk):
        folder.mkdir(parents=True)
    if linked:
        (output / "metrics.jsonl").symlink_to(disk / "metrics.jsonl")
        monkeypatch.setattr(os, "link", no_second_names)
    write(output / "checkpoints", 100)
    for name in ("metrics.jsonl", "visualdl/vdlrecords.train.log", "images/confusion.png"):
        (output / name).write_text("old")
    before = logs(tmp_path)
    start(output, overwrite=True)
    assert logs(output)["metrics.jsonl"] == "old"
    sinks = open_sinks(output, reporting=True)
    sinks.write(1, {"train/loss": 0.5})
    sinks.close()
    (output / "images" / "confusion.png").unlink()
    (output / "images" / "confusion.png").write_text("new")
    assert "0.5" in logs(output)["metrics.jsonl"]
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):  # that one has ended early
        start(output)
    assert logs(tmp_path) == before
    checkpoints = Checkpoints(output)
    start(output, checkpoints, overwrite=True)
    open_sinks(output, reporting=True).close()
    assert len(logs(tmp_path)) > len(before)
    checkpoints.save(None, TrainState(1, 10, 10, 1, {}, {}, {}, {}))
    assert logs(tmp_path).keys() == before.keys()
    assert "old" not in logs(output)["metrics.jsonl"]
