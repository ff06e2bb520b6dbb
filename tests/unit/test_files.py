"""Files: links are not followed, reads are bounded, and damage of tensors is attributed to the first damaged one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fleet_train.convert import persistables
from fleet_train.convert.program_state import SavedState
from fleet_train.errors import CheckpointError
from fleet_train.files import NotThatFile, lines_of, read_regular, write_new
from fleet_train.launch.logs import LogFolder
from fleet_train.launch.node import Node
from fleet_train.launch.processes import end_of
from fleet_train.launch.terminal import Follower
from fleet_train.port.script import Ported, write
from fleet_train.train.checkpoint.newest import write_record
from fleet_train.train.checkpoint.storage import TrainingRun
from fleet_train.train.metrics import JsonLinesSink, VisualDLSink
from fleet_train.train.reference import publish_summary
from tests.support.checkpoints import write_folder


def _image(folder: Path) -> None:
    sink = JsonLinesSink(folder)
    sink.image(1, "test/mistakes", np.zeros((2, 2, 3), np.uint8))
    sink.close()


def _state(folder: Path) -> None:
    write_folder(folder, SavedState({"w": np.zeros(2)}, {"w": "parameter"}, [{"own": np.zeros(2)}]))


def _ported(folder: Path) -> None:
    (folder / "train.py").write_text("old")
    write(Ported(str(folder / "train.py"), b"old", b"new", (), "", ""))


def _end_of_a_rank(folder: Path) -> None:
    logs = LogFolder(Node(("127.0.0.1",), 0, 6170, 1, None, None), folder)
    rank = logs.start_rank(0, [sys.executable, "-c", ""], {})
    rank.wait()
    rank.await_record(60.0)


WRITERS: list[tuple[str, Callable[[Path], None]]] = [
    (".metrics.jsonl.draft", _image),
    ("images/.test_mistakes.png.draft", _image),
    (".vdlrecords.train.log.draft", lambda folder: VisualDLSink(folder).close()),
    (".summary.json.draft", lambda folder: publish_summary(folder, {})),
    ("persistables.safetensors.part", _state),
    ("ranks.safetensors.part", _state),
    ("complete.json.part", _state),
    (".run.json", lambda folder: write_record(folder, TrainingRun.new())),
    (".train.py.ported", _ported),
    ("workerend.0.json.tmp", _end_of_a_rank),
]


@pytest.mark.parametrize(("name", "write_there"), WRITERS, ids=[name for name, _ in WRITERS])
def test_a_link_under_the_name_of_a_draft_is_not_written_through(
    tmp_path: Path, name: str, write_there: Callable[[Path], None]
) -> None:
    precious, shared = tmp_path / "precious", tmp_path / "shared"
    precious.write_text("mine")
    (shared / name).parent.mkdir(parents=True)
    (shared / name).symlink_to(precious)
    write_there(shared)
    assert precious.read_text() == "mine"
    assert not list(shared.rglob(Path(name).name))  # it has become the file


def test_a_new_file_has_the_rights_that_other_files_of_the_user_have(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    write_new(tmp_path / "new", b"content")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_pipe_in_the_place_of_a_log_blocks_no_launcher(tmp_path: Path) -> None:
    pipe = tmp_path / "workerlog.0"
    os.mkfifo(pipe)
    assert end_of(pipe) == ""
    Follower(pipe).pump()


def test_lines_are_read_one_by_one_up_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\ntwo\nthree")
    assert list(lines_of(tmp_path / "file", 13)) == [b"one\n", b"two\n", b"three"]
    with pytest.raises(NotThatFile, match="has 13 bytes, at most 12"):
        list(lines_of(tmp_path / "file", 12))
    assert len(b"".join(lines_of("/proc/self/status", 100))) == 100  # of a size that is not told


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    assert read_regular(tmp_path / "file", 8) == b"12345678"
    with pytest.raises(NotThatFile, match="has 8 bytes, at most 7"):
        read_regular(tmp_path / "file", 7)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="is not a regular file"):
            read_regular(path, 8)
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(3 << 30)
    with pytest.raises(NotThatFile, match="has 3221225472 bytes"):
        read_regular(tmp_path / "huge", 1 << 20)


ARRAYS = {
    "weight": np.arange(12, dtype="float32").reshape(3, 4),
    "count": np.array([7], "int64"),
    "scalar": np.array(0.5, "float64"),
    "bits": np.arange(5, dtype="uint16"),
    "flags": np.array([True, False]),
    "empty": np.empty((0, 3), "float32"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def test_what_is_written_is_read_back_by_us_and_by_the_package(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistables, "_CHUNK", 7)  # tensors of several pieces
    contents = persistables.write_safetensors(path, ARRAYS)
    for found in (load_file(path), persistables.read_safetensors(path, contents)):
        assert sorted(found) == sorted(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(found[name], array, strict=True)


def test_every_altered_byte_is_noticed_and_put_down_to_a_tensor(path: Path) -> None:
    contents = persistables.write_safetensors(path, ARRAYS)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        told = r"tensor '\w+' was altered" if place >= begin else "was altered before its first tensor 'weight'"
        with pytest.raises(CheckpointError, match=told):
            persistables.read_safetensors(path, contents)
    for size, where in {begin: "in tensor 'weight'", begin + 48: "in tensor 'count'", 5: "before its first"}.items():
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=f"a.safetensors is cut off {where}"):
            persistables.read_safetensors(path, contents)
    path.write_bytes(whole[: begin + 50] + b"\x01" + whole[begin + 51 :])
    with pytest.raises(CheckpointError, match=r"tensor 'count' was altered after it was written \(SHA-256 differs\)"):
        persistables.read_safetensors(path, contents)


def test_dtype_without_a_code_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensors of dtype complex64 cannot be saved"):
        persistables.write_safetensors(path, {"c": np.zeros(2, "complex64")})
