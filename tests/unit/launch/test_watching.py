from __future__ import annotations

import io
import json
from pathlib import Path

from fleet_train.launch.node import Node
from fleet_train.launch.watching import Follower, RankFiles

NODE = Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0")


def test_records_of_another_job_are_not_ours(tmp_path: Path) -> None:
    files = RankFiles(NODE, tmp_path, "7-new")
    (tmp_path / "workerend.0.json").write_text(json.dumps({"token": "6-old", "wrapper_pid": 1}))
    (tmp_path / "workerend.1.json").write_text(json.dumps({"token": "7-new", "wrapper_pid": 42}))
    assert files.wrapper_pids() == [42]
    assert files.ends(0.0) == {}


def test_an_end_is_placed_in_the_job(tmp_path: Path) -> None:
    record = {"token": "7-new", "rank": 3, "wrapper_pid": 42, "ended_monotonic": 12.5, "exit_code": 2, "signal": None}
    (tmp_path / "workerend.1.json").write_text(json.dumps({**record, "asked_to_stop": None}))
    end = RankFiles(NODE, tmp_path, "7-new").ends(10.0)[1]
    assert (end.rank, end.endpoint, end.node_index, end.seconds) == (3, "10.0.0.2:6171", 1, 2.5)
    assert (end.exit_code, end.log_file, end.asked_to_stop) == (2, str(tmp_path / "workerlog.1"), False)


def test_files_of_an_earlier_job_are_removed_other_files_stay(tmp_path: Path) -> None:
    for name in ("workerlog.0", "workerend.1.json", "workerlog.7", "notes.txt"):
        (tmp_path / name).touch()
    RankFiles(NODE, tmp_path, "7-new").prepare()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "workerlog.7"]


def test_the_follower_copies_what_is_there_and_what_comes(tmp_path: Path) -> None:
    sink = io.BytesIO()
    follower = Follower(tmp_path / "workerlog.0", sink)
    follower.pump()
    with (tmp_path / "workerlog.0").open("wb") as log:
        log.write(b"one\n")
        log.flush()
        follower.pump()
        log.write(b"50%\r100%")
    follower.close()
    assert sink.getvalue() == b"one\n50%\r100%\n"
