"""Checkpoint folders: published whole or not at all, refused when altered, and read as they were stored.

The folder ``stored`` beside this test has states that were saved in November 2026: later versions go on with them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from fleet_train import fleet
from fleet_train.convert import persistables
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from tests.support.checkpoints import publish

ANOTHER = storage.TrainingRun(1, 9.0, "begun later")


def write(checkpoints: Path, step: int, content: str = "tensors") -> Path:
    return publish(checkpoints, step, {"epoch": step // 10, "step": step}, content=content.encode())


def test_newest_comes_last_and_a_folder_without_marker_is_ignored(tmp_path: Path) -> None:
    for step in (20, 100_000_000, 99_999_999):
        write(tmp_path, step)
    (tmp_path / "step-00000200").mkdir()
    storage.begin(tmp_path, 300)
    assert [path.name for path in storage.complete(tmp_path)] == ["step-00000020", "step-99999999", "step-100000000"]
    assert storage.complete(tmp_path / "nothing") == []


def test_what_has_trained_most_is_the_newest_also_where_more_ranks_count_fewer_steps(tmp_path: Path) -> None:
    for step, epoch, consumed in ((150, 10, 0), (253, 11, 0), (172, 11, 672), (180, 12, 0)):
        publish(tmp_path, step, {"epoch": epoch, "step": step, "consumed_samples": consumed})
    names = ["step-00000150", "step-00000253", "step-00000172", "step-00000180"]
    assert [path.name for path in storage.complete(tmp_path)] == names
    (tmp_path / "step-00000253" / "complete.json").write_text("{")  # behind those with lower names
    assert [path.name for path in storage.complete(tmp_path)] == [names[0], *names[2:], names[1]]
    storage.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000180", "step-00000253"]


def test_a_step_can_be_published_again_and_nothing_of_a_killed_runs_draft_is_in_it(tmp_path: Path) -> None:
    write(tmp_path, 20, "first")
    (storage.begin(tmp_path, 20) / "half.safetensors").write_text("half")
    folder = write(tmp_path, 20, "second")
    assert storage.read(folder).state == {"epoch": 2, "step": 20}
    assert not (folder / "half.safetensors").exists()
    assert (folder / "persistables.safetensors").read_bytes().endswith(b"second")
    storage.prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


def test_what_users_put_beside_the_checkpoints_is_neither_read_nor_removed(tmp_path: Path) -> None:
    write(tmp_path, 10).rename(tmp_path / "step-00000900-before-the-change")
    (tmp_path / "step-by-step.txt").touch()
    for step in (20, 30, 40):
        write(tmp_path, step)
    storage.begin(tmp_path, 50)
    kept, users = ["step-00000030", "step-00000040"], ["step-00000900-before-the-change", "step-by-step.txt"]
    assert [path.name for path in storage.complete(tmp_path)] == ["step-00000020", *kept]
    storage.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, *users]
    storage.remove_others(tmp_path, ANOTHER)
    assert sorted(path.name for path in tmp_path.iterdir()) == users


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


def test_what_killed_runs_left_goes_with_an_overwritten_run_and_what_was_moved_aside_stays(
    tmp_path: Path,
) -> None:
    write(tmp_path, 10).rename(tmp_path / ".replaced-step-00000010")
    write(tmp_path, 20).rename(tmp_path / ".removing-step-00000020")
    write(tmp_path, 20)
    storage.begin(tmp_path, 30)
    for name in (".copying-step-00000040", ".removing-copying-step-00000040", ".removing-writing-step-00000040"):
        (tmp_path / name).mkdir()
    for step, why in ((50, "damaged"), (60, "of-run-aa")):
        storage.move_aside(write(tmp_path, step), why)
    (tmp_path / storage.RECORD).write_text("{}")
    own = publish(tmp_path, 70, {"step": 70}, run=ANOTHER)
    storage.remove_others(tmp_path, ANOTHER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "of-run-aa", "run.json", own.name]


def test_an_earlier_run_that_a_killed_process_left_does_not_count(tmp_path: Path) -> None:
    """It has trained for longer: neither is it the newest, nor does it cost the later run its checkpoints."""
    old, new = storage.TrainingRun(1, 9.0, "old"), storage.TrainingRun(2, 5.0, "new")
    for step, run in ((500, old), (10, new), (20, new)):
        publish(tmp_path, step, {"step": step}, score=float(step), run=run)
    assert [path.name for path in storage.of_latest_run(tmp_path)] == ["step-00000010", "step-00000020"]
    assert storage.best(tmp_path) == storage.folder_of(tmp_path, 20)
    storage.prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020"]


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
        (b'"format": 3', b'"format": 99', "format 99; this version reads format 3"),
    ],
)
def test_a_cut_off_or_altered_state_or_one_of_a_later_version_is_named(
    tmp_path: Path, old: bytes, new: bytes, problem: str
) -> None:
    marker = write(tmp_path, 20) / "complete.json"
    marker.write_bytes(marker.read_bytes().replace(old, new))
    with pytest.raises(CheckpointError, match=problem):
        storage.read(marker.parent)


STORED = Path(__file__).with_name("stored")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "stored"))


@pytest.fixture
def network(one_process: None) -> Any:
    """The network whose state is stored."""
    del one_process
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.utils.unique_name.guard(),
    ):
        loss = paddle.mean(paddle.nn.Linear(4, 1)(paddle.static.data("features", [None, 4], "float32")) ** 2)
        fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1)).minimize(loss)
        paddle.static.Executor().run(fleet.startup_program)
        yield fleet.main_program


def assert_holds(program: Any, folder: Path) -> None:
    expected = load_file(folder / "persistables.safetensors")
    for name, value in program.state_dict("all").items():
        np.testing.assert_array_equal(np.array(value), expected[name], strict=True)


def test_a_run_goes_on_from_a_checkpoint_that_was_stored(stored: Path, network: Any) -> None:
    checkpoints = Checkpoints(stored / "run", keep=2)
    found, best = checkpoints.newest(), checkpoints.best()
    assert found is not None
    assert best is not None
    assert (found.state.step, found.score, best.state.step) == (3, -1 / 3, 3)
    assert found.state.data == {"classes": ["cat", "dog"], "lists": {"abc": {"samples": 48, "ranks": 1, "done": None}}}
    checkpoints.load(None, found)
    assert_holds(network, found.folder)
    later = TrainState(0, 4, 6, 1, {}, {}, {}, {}, consumed_samples=32)
    path = checkpoints.save(None, later, score=0.0)
    checkpoints.finish()
    checkpoints.close()
    assert path is not None
    assert sorted(each.name for each in path.iterdir()) == ["complete.json", "persistables.safetensors"]
    assert [each.name for each in storage.complete(checkpoints.folder)] == ["step-00000003", "step-00000004"]
    assert storage.read(path).run == storage.read(found.folder).run


def test_a_folder_of_save_persistables_is_loaded_and_replaced(stored: Path, network: Any) -> None:
    folder = stored / "persistables"
    fleet.load_persistables(None, str(folder))
    assert_holds(network, folder)
    fleet.save_persistables(None, str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", "persistables.safetensors"]
    fleet.load_persistables(None, str(folder))
    assert_holds(network, folder)


def test_each_ranks_own_state_is_read() -> None:
    state = persistables.read_folder(STORED / "two_ranks")
    assert state.kinds == {"w": "parameter", "b": "optimizer"}
    assert state.arrays["fleet_train/step"].tolist() == [4]
    np.testing.assert_array_equal(state.arrays["w"], np.arange(6, dtype="float32").reshape(2, 3), strict=True)
    assert [own["fleet_train/errors/w"][0, 0] for own in state.ranks] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("complete.json", b"1", b"2", "complete.json was altered after it was written"),
        ("persistables.safetensors", b"", None, "persistables.safetensors is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused(stored: Path, name: str, old: bytes, new: bytes | None, problem: str) -> None:
    path = stored / "run" / "checkpoints" / "step-00000003" / name
    if new is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=problem):
        storage.read(path.parent)
    assert storage.complete(path.parent.parent)[-1] == path.parent, "the newest one is not skipped silently"


def test_an_altered_tensor_is_named(stored: Path) -> None:
    path = stored / "run" / "checkpoints" / "step-00000003" / "persistables.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    with pytest.raises(CheckpointError, match=r"tensor '.+' was altered after it was written \(SHA-256 diff"):
        persistables.read_folder(path.parent)
