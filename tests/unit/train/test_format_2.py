"""What earlier versions saved, in `format_2` beside this test: read, resumed, refused where it is damaged, copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
from fleet_train.train.checkpoint.transfer import Receiver, send

STORED = Path(__file__).parent / "format_2"


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


def values(program: Any) -> dict[str, Any]:
    return {name: np.array(value) for name, value in program.state_dict("all").items()}


def test_a_run_goes_on_from_its_checkpoint_and_saves_in_the_present_format(stored: Path, network: Any) -> None:
    checkpoints = Checkpoints(stored / "run", keep=2)
    found, best = checkpoints.newest(), checkpoints.best()
    assert found is not None
    assert best is not None
    assert (found.state.step, found.score, best.state.step) == (3, -1 / 3, 3)
    assert found.state.data == {"classes": ["cat", "dog"], "lists": {"abc": {"samples": 48, "ranks": 1, "done": None}}}
    checkpoints.load(None, found)
    expected = load_file(found.folder / "persistables.safetensors")
    for name, value in values(network).items():
        np.testing.assert_array_equal(value, expected[name], strict=True)
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
    expected = load_file(folder / "persistables.safetensors")
    for name, value in values(network).items():
        np.testing.assert_array_equal(value, expected[name], strict=True)
    fleet.save_persistables(None, str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", "persistables.safetensors"]
    assert load_file(folder / "persistables.safetensors").keys() == expected.keys()
    fleet.load_persistables(None, str(folder))


def test_each_ranks_own_state_is_read() -> None:
    state = persistables.read_folder(STORED / "two_ranks")
    assert state.kinds == {"w": "parameter", "b": "optimizer"}
    assert state.arrays["fleet_train/step"].tolist() == [4]
    np.testing.assert_array_equal(state.arrays["w"], np.arange(6, dtype="float32").reshape(2, 3), strict=True)
    assert [own["fleet_train/errors/w"][0, 0] for own in state.ranks] == [1.0, 2.0]


def test_it_is_copied_to_another_node_as_it_is(stored: Path, tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "theirs", "127.0.0.3")
    folder = stored / "run" / "checkpoints" / "step-00000003"
    assert [send(receiver.address, "127.0.0.2", folder) for _ in range(2)] == [True, False]
    receiver.close()
    theirs = tmp_path / "theirs" / folder.name
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def altered(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))


def with_marker(**entries: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return change


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("state.json", altered, "state.json was altered after it was written"),
        ("persistables.json", altered, "persistables.json was altered after it was written"),
        ("state.json", Path.unlink, "state.json is missing"),
        ("persistables.json", Path.unlink, "persistables.json is missing"),
        ("persistables.safetensors", Path.unlink, "persistables.safetensors is missing"),
        ("complete.json", with_marker(files=[]), "was altered after it was written"),
        (
            "complete.json",
            with_marker(files={"state.json": "ab", "../../etc/passwd": "ab"}),
            "was altered after it was",
        ),
        ("complete.json", with_marker(score="high"), "its score is not a number"),
    ],
)
def test_a_damaged_checkpoint_is_refused(stored: Path, name: str, damage: Any, problem: str) -> None:
    folder = stored / "run" / "checkpoints" / "step-00000003"
    damage(folder / name)
    with pytest.raises(CheckpointError, match=problem):
        storage.read(folder)
    assert storage.complete(folder.parent)[-1] == folder, "the newest one is not skipped silently"


def test_a_damaged_tensor_is_named(stored: Path) -> None:
    path = stored / "persistables" / "persistables.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    with pytest.raises(CheckpointError, match=r"tensor '.+' was altered after it was written \(SHA-256 differs\)"):
        persistables.read_folder(path.parent)
