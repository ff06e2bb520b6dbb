"""Files in folders that others may write to: links are not followed, and reads are bounded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleet_train.convert.program_state import State
from fleet_train.files import NotThatFile, read_regular, write_new
from fleet_train.launch.logs import LogFolder
from fleet_train.launch.node import Node
from fleet_train.port.script import Ported, write
from fleet_train.train.checkpoint.newest import write_record
from fleet_train.train.checkpoint.storage import Run
from fleet_train.train.metrics import JsonLinesSink, VisualDLSink
from fleet_train.train.reference import publish_summary
from tests.support.checkpoints import write_folder


def _metrics(folder: Path) -> None:
    JsonLinesSink(folder).close()


def _image(folder: Path) -> None:
    sink = JsonLinesSink(folder)
    sink.image(1, "test/mistakes", np.zeros((2, 2, 3), np.uint8))
    sink.close()


def _visualdl(folder: Path) -> None:
    VisualDLSink(folder).close()


def _summary(folder: Path) -> None:
    publish_summary(folder, {})


def _state(folder: Path) -> None:
    write_folder(folder, State({"w": np.zeros(2)}, {"w": "parameter"}, [{"own": np.zeros(2)}]))


def _record_of_the_run(folder: Path) -> None:
    write_record(folder, Run.new())


def _ported(folder: Path) -> None:
    (folder / "train.py").write_text("old")
    write(Ported(str(folder / "train.py"), b"old", b"new", ()))


def _end_of_a_rank(folder: Path) -> None:
    logs = LogFolder(Node(("127.0.0.1",), 0, 6170, 1, None, None), folder)
    rank = logs.start_rank(0, [sys.executable, "-c", ""], {})
    rank.wait()
    rank.await_record(60.0)


WRITERS: list[tuple[str, Callable[[Path], None]]] = [
    (".metrics.jsonl.draft", _metrics),
    ("images/.test_mistakes.png.draft", _image),
    (".vdlrecords.train.log.draft", _visualdl),
    (".summary.json.draft", _summary),
    ("persistables.safetensors.part", _state),
    ("ranks.safetensors.part", _state),
    ("complete.json.part", _state),
    (".run.json", _record_of_the_run),
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
