"""Checkpoints of a run on one process: what is kept, what is best, and what happens when the disk is in the way."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest

from fleet_train import fleet, timeouts
from fleet_train.errors import CheckpointError, NotSaved
from fleet_train.train.checkpoint import claim, storage
from fleet_train.train.checkpoint.copies import Copies
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from tests.support.processes import clean_environ, python


@pytest.fixture(autouse=True)
def program(small_loss: Any) -> None:
    """A job of one process with a trained program in a scope of its own."""
    fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1)).minimize(small_loss)
    paddle.static.Executor().run(fleet.startup_program)


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
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

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
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.folder.name == "step-00000010"
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
def hanging_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is published waits for a pipe that nobody writes to, as for a file server that is away."""
    os.mkfifo(tmp_path / "pipe")

    def hangs(*_: object) -> Path:
        (tmp_path / "pipe").read_bytes()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "publish", hangs)
    yield
    with (tmp_path / "pipe").open("w"):  # lets the thread go
        pass


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

    def slow(*arguments: Any) -> Path:
        time.sleep(0.5)
        return published(*arguments)

    monkeypatch.setattr(storage, "publish", slow)
    monkeypatch.setattr("fleet_train.timeouts.RANKS_SYNC_SECONDS", 0.05)
    checkpoints = Checkpoints(tmp_path, timeout_seconds=60.0)
    assert checkpoints.save(None, state(10)) == checkpoints.folder / "step-00000010"


HOLDS = """
import sys
from pathlib import Path
from fleet_train.files import hold
held = hold(Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of another run that uses the folder."""
    (tmp_path / "checkpoints").mkdir()
    command = python("-c", HOLDS, str(tmp_path / "checkpoints"))
    with subprocess.Popen(
        command, env=clean_environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_folder_that_another_process_uses_is_refused_by_name(
    tmp_path: Path, other_run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "FOLDER_HERE_SECONDS", 0.5)
    who = f"is in use by process {other_run.pid} of {socket.gethostname()}: two runs in one folder would"
    for refused in (lambda made: made.claim(), lambda made: made.save(None, state(10))):
        with pytest.raises(CheckpointError, match=who):
            refused(Checkpoints(tmp_path))
    assert not storage.complete(tmp_path / "checkpoints")


def test_a_process_that_is_about_to_end_is_waited_for(
    tmp_path: Path, other_run: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    threading.Timer(0.5, other_run.kill).start()
    assert Checkpoints(tmp_path).save(None, state(10)) is not None
    assert f"is in use by process {other_run.pid} of " in capsys.readouterr().err


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


def test_nothing_can_be_written_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(claim, "hold", fails)
    said = (
        r"checkpoints cannot be written: Read-only file system; make it writable, or give another folder \(--output_dir"
    )
    with pytest.raises(CheckpointError, match=said):
        Checkpoints(tmp_path).claim()


def test_copies_that_are_missing_at_the_end_are_an_error_and_at_a_stop_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, copies=2, say=lambda _: None)
    told = ["there is no copy on rank 1"]
    monkeypatch.setattr(Copies, "finish", lambda *_: told[0])
    path = checkpoints.save(None, state(10))
    with pytest.raises(NotSaved, match="there is no copy on rank 1"):
        checkpoints.finish()
    assert checkpoints.wait(1.0) == (path, told[0])
    told[0] = ""
    assert checkpoints.finish() == path
