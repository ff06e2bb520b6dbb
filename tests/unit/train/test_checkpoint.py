"""Checkpoints of a run on one process: what is kept, what is best, and what happens when the disk is in the way.

The folder, or parts of it, may be links: users put checkpoints on another disk.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fleet_train import timeouts
from fleet_train.errors import CheckpointError, NotSaved
from fleet_train.train import reference
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.copies import Copies
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from fleet_train.train.config import TrainConfig
from fleet_train.train.metrics import AppendOnlyFile, open_sinks
from fleet_train.train.reference import publish_summary
from tests.support.checkpoints import held_by_another_process, publish
from tests.support.processes import clean_environ, python

pytestmark = pytest.mark.usefixtures("program")


def state(step: int) -> TrainState:
    return TrainState(1, step, 10, 1, {}, {}, {}, {}, consumed_samples=7 * step)


def kept(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.glob("*step-*"))


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
    fails = Mock(side_effect=OSError(28, "No space left on device"))
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, background=background, say=said.append)
    assert checkpoints.save(None, state(10)) == checkpoints.finish(), said
    monkeypatch.setattr(storage, "begin", fails)
    checkpoints.save(None, state(20))
    for _ in range(2):
        with pytest.raises(
            NotSaved, match=r"of step 20 could not be written: .*; the newest one is .*/step-00000010: "
        ):
            checkpoints.finish()
    assert len(said) == 1
    assert said[0].startswith("the checkpoint of step 20 could not be written: ")
    monkeypatch.undo()
    monkeypatch.setattr(storage, "prune", fails)
    checkpoints.save(None, state(30))
    assert checkpoints.finish() == checkpoints.folder / "step-00000030"
    assert said[1].startswith("the checkpoint of step 30 is written, but older ones could not be removed: ")
    monkeypatch.undo()
    checkpoints.save(None, state(40))
    assert checkpoints.finish() == checkpoints.folder / "step-00000040"
    assert (kept(checkpoints), len(said)) == (["step-00000030", "step-00000040"], 2)


@pytest.fixture
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is published waits, as for a file server that is away."""
    back = threading.Event()

    def hangs(*_: object) -> Path:
        back.wait()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "publish", hangs)
    yield
    back.set()


@pytest.mark.usefixtures("hanging_disk")
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_hangs_is_waited_for_as_long_as_was_asked(tmp_path: Path, background: bool) -> None:
    checkpoints = Checkpoints(tmp_path, background=background, timeout_seconds=0.2)
    said = r"the checkpoint of step 10 was not written within 0.2 s: .* at \S+/checkpoints/.writing-step-00000010; "
    if background:
        checkpoints.save(None, state(10))
    else:
        with pytest.raises(CheckpointError, match=said):
            checkpoints.save(None, state(10))
    with pytest.raises(CheckpointError, match=said):
        checkpoints.finish()
    with pytest.raises(CheckpointError, match=said):
        checkpoints.save(None, state(20))


def test_a_slow_disk_is_not_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = storage.publish
    monkeypatch.setattr(storage, "publish", lambda *given: time.sleep(0.5) or published(*given))
    monkeypatch.setattr(timeouts, "RANKS_SYNC_SECONDS", 0.05)
    checkpoints = Checkpoints(tmp_path, timeout_seconds=60.0)
    assert checkpoints.save(None, state(10)) == checkpoints.folder / "step-00000010"


def test_a_folder_that_another_process_uses_is_refused_by_name_unless_it_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "FOLDER_HERE_SECONDS", 0.5)
    (tmp_path / "checkpoints").mkdir()
    with held_by_another_process(tmp_path / "checkpoints") as other:
        who = f"is in use by process {other.pid} of {socket.gethostname()}: two runs in one folder would"
        for refused in (lambda made: made.claim(), lambda made: made.save(None, state(10))):
            with pytest.raises(CheckpointError, match=who):
                refused(Checkpoints(tmp_path))
        assert not storage.complete(tmp_path / "checkpoints")
        monkeypatch.setattr(timeouts, "FOLDER_HERE_SECONDS", 60.0)
        threading.Timer(0.2, other.kill).start()
        assert Checkpoints(tmp_path).save(None, state(10)) is not None


def test_a_folder_is_free_for_others_after_close_and_in_a_forked_process_that_goes_on(tmp_path: Path) -> None:
    checkpoints, again = Checkpoints(tmp_path), Checkpoints(tmp_path)
    for each in (checkpoints, again):  # of one process
        each.save(None, state(10))
    is_free = "from fleet_train.files import hold; import sys, pathlib; hold(pathlib.Path(sys.argv[1]))"
    command = python("-c", is_free, str(checkpoints.folder))
    assert subprocess.run(command, env=clean_environ(), stderr=subprocess.DEVNULL, check=False).returncode == 1
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    os.close(reads)
    checkpoints.close()
    assert subprocess.run(command, env=clean_environ(), check=False).returncode == 0
    os.close(writes)
    os.waitpid(child, 0)


def test_copies_that_are_missing_at_the_end_are_an_error_and_at_a_stop_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, copies=2, say=lambda _: None)
    told = ["there is no copy on rank 1"]
    monkeypatch.setattr(Copies, "lacking", lambda *_: told[0])
    path = checkpoints.save(None, state(10))
    with pytest.raises(NotSaved, match="there is no copy on rank 1"):
        checkpoints.finish()
    assert checkpoints.wait(1.0) == (path, told[0])
    told[0] = ""
    assert checkpoints.finish() == path


def start(output: Path, checkpoints: Checkpoints | None = None, **flags: Any) -> Any:
    return reference.start_or_resume(TrainConfig(output_dir=str(output), **flags), checkpoints or Checkpoints(output))


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


def test_a_link_that_somebody_else_has_made_or_to_no_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "pipe")
    file = AppendOnlyFile(tmp_path / "metrics.jsonl")
    file.append(b"{}\n")
    file.close()
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "summary.json").symlink_to(tmp_path / "precious")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    publish_summary(tmp_path, {"steps": 1})
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "summary.json").read_text() == '{\n  "steps": 1\n}\n'
    assert not (tmp_path / "summary.json").is_symlink()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose checkpoints, with two of an earlier run, are on another disk."""
    for step in (100, 200):
        publish(tmp_path / "disk", step, {"step": step})
    (tmp_path / "disk" / "notes.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    return tmp_path / "run"


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
    checkpoints.save(None, state(10))
    assert sorted(path.name for path in (tmp_path / "disk").glob("[!.]*")) == ["notes.txt", "step-00000010"]
    assert os.readlink(run / "checkpoints") == str(tmp_path / "disk")
    assert [path.name for path in storage.complete(tmp_path / "disk")] == ["step-00000010"]


def test_a_run_of_another_model_is_not_resumed(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(None, replace(state(10), config=asdict(TrainConfig(model="mlp"))))
    with pytest.raises(
        CheckpointError, match=r"was written with --model mlp, now --model cnn is given; resume with --m"
    ):
        start(tmp_path, model="cnn", resume=True)
    assert start(tmp_path, model="mlp", resume=True).state.step == 10


def test_a_checkpoint_that_cannot_be_removed_ends_the_job(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(run)
    start(run, checkpoints, overwrite=True)
    denied = PermissionError(13, "Permission denied", "step-00000100")
    monkeypatch.setattr(storage, "_marked_for_removal", Mock(side_effect=denied))
    with pytest.raises(CheckpointError, match=r"an earlier run in .* cannot be removed: .*Permission denied: 'step-0"):
        checkpoints.save(None, state(10))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("away", "is a link to .*away, which is not a folder: .*; mount its disk, make that folder, or remove"),
        ("file", "is a link to .*file, which is not a folder"),
        ("", "is not a folder; move it away"),
    ],
)
@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}], ids=["new", "resume", "overwrite"])
@pytest.mark.parametrize("where", ["disk", "disk/run", "disk/run/checkpoints"])
def test_what_is_no_folder_is_refused_before_anything_is_trained(
    tmp_path: Path, target: str, said: str, flags: dict[str, Any], where: str
) -> None:
    path = tmp_path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("file").touch()
    if target:
        path.symlink_to(path.with_name(target))
    else:
        path.touch()
    with pytest.raises(CheckpointError, match=said):
        start(tmp_path / "disk" / "run", **flags)


def test_a_folder_that_another_rank_makes_meanwhile_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: path.mkdir(exist_ok=True) or exists(path))
    storage.refuse_no_folder(tmp_path / "checkpoints")


@pytest.mark.parametrize("linked", [False, True])
def test_logs_of_a_replaced_run_stay_until_the_new_one_has_a_checkpoint(
    tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logs(folder: Path) -> dict[str, str]:
        found = [path for path in folder.rglob("*") if path.suffix in (".jsonl", ".log")]
        return {path.name: path.read_text(errors="replace") for path in found}

    output, disk = tmp_path / "out", tmp_path / "disk"
    for folder in (output / "visualdl", disk):
        folder.mkdir(parents=True)
    if linked:
        (output / "metrics.jsonl").symlink_to(disk / "metrics.jsonl")
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(1, "Operation not permitted")))
    publish(output / "checkpoints", 100, {"step": 100})
    for name in ("metrics.jsonl", "visualdl/vdlrecords.train.log"):
        (output / name).write_text("old")
    before = logs(tmp_path)
    start(output, overwrite=True)
    assert logs(output)["metrics.jsonl"] == "old"
    sinks = open_sinks(output, reporting=True)
    sinks.write(1, {"train/loss": 0.5})
    sinks.close()
    assert "0.5" in logs(output)["metrics.jsonl"]
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):  # that one has ended early
        start(output)
    assert logs(tmp_path) == before
    checkpoints = Checkpoints(output)
    start(output, checkpoints, overwrite=True)
    open_sinks(output, reporting=True).close()
    assert len(logs(tmp_path)) > len(before)
    checkpoints.save(None, state(10))
    assert logs(tmp_path).keys() == before.keys()
    assert "old" not in logs(output)["metrics.jsonl"]
