from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from fleet_train.launch import watching
from fleet_train.launch.node import Node
from fleet_train.launch.watching import Follower, RankFiles

NODE = Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0")


def test_records_of_another_job_are_not_ours(tmp_path: Path) -> None:
    files = RankFiles(NODE, tmp_path, "7-new")
    (tmp_path / "workerend.0.json").write_text(json.dumps({"token": "6-old", "wrapper_pid": 1}))
    (tmp_path / "workerend.1.json").write_text(json.dumps({"token": "7-new", "wrapper_pid": 42}))
    assert files.wrapper_pids() == [42]
    assert files.ends(0.0) == {}


@pytest.mark.parametrize("content", [b"[]", b"7", b"{", b"[" * 60_000, b"\xff", b"9" * 60_000, b" " * 100_000])
def test_a_record_that_is_none_is_a_strangers(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "workerend.0.json").write_bytes(content)
    os.mkfifo(tmp_path / "workerend.1.json")
    assert RankFiles(NODE, tmp_path, "7-new").records() == {}


def test_an_end_is_placed_in_the_job(tmp_path: Path) -> None:
    record = {"token": "7-new", "rank": 3, "wrapper_pid": 42, "ended_monotonic": 12.5, "exit_code": 2, "signal": None}
    (tmp_path / "workerend.1.json").write_text(json.dumps({**record, "asked_to_stop": None}))
    end = RankFiles(NODE, tmp_path, "7-new").ends(10.0)[1]
    assert (end.rank, end.endpoint, end.node_index, end.seconds) == (3, "10.0.0.2:6171", 1, 2.5)
    assert (end.exit_code, end.log_file, end.asked_to_stop) == (2, str(tmp_path / "workerlog.1"), False)


def test_a_reported_exit_counts_if_the_file_has_none(tmp_path: Path) -> None:
    began = {"token": "7-new", "rank": 3, "local_rank": 1, "wrapper_pid": 42}
    (tmp_path / "workerend.1.json").write_text(json.dumps(began))
    ended = {**began, "ended_monotonic": 12.5, "exit_code": 0, "signal": None, "asked_to_stop": None}
    files = RankFiles(NODE, tmp_path, "7-new", heard=lambda: {1: ended})
    assert files.ends(10.0)[1].succeeded
    assert files.wrapper_pids() == []


def test_files_of_an_earlier_job_are_removed_other_files_stay(tmp_path: Path) -> None:
    for name in ("workerlog.0", "workerend.1.json", "workerlog.7", "notes.txt"):
        (tmp_path / name).touch()
    RankFiles(NODE, tmp_path, "7-new").prepare()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "workerlog.7"]


class Screen:
    """Stands in for the terminal: has room for so many chunks, and gets more of it ``reads`` times when waited for."""

    def __init__(self, room: int = 100, reads: int = 0) -> None:
        self.shown: list[bytes] = []
        self.left_out = 0
        self._room, self._reads = room, reads

    def has_room(self) -> bool:
        return len(self.shown) < self._room

    def show(self, text: bytes) -> None:
        self.shown.append(text)

    def drain(self) -> bool:
        self._reads -= 1
        self._room += 1
        return self._reads >= 0

    def leave_out(self, lines: int) -> None:
        self.left_out += lines


def follower_on(screen: Screen, path: Path) -> Follower:
    return Follower(path, screen, screen.show)  # type: ignore[arg-type]


def test_connections_of_an_earlier_job_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    listed = {"old"}

    def connections_at(endpoints: Iterable[tuple[str, int]]) -> frozenset[str]:
        asked[:] = endpoints
        return frozenset(listed)

    monkeypatch.setattr(watching, "connections_at", connections_at)
    connections = watching.Connections(NODE)
    assert asked == [(f"10.0.0.{node}", port) for node in (1, 2) for port in (6170, 6171)]
    connections.look()
    assert not connections.seen
    listed.add("new")
    connections.look()
    listed.clear()
    connections.look()
    assert connections.seen, "it has ended"


def test_the_follower_copies_what_is_there_and_what_comes(tmp_path: Path) -> None:
    screen = Screen()
    follower = follower_on(screen, tmp_path / "workerlog.0")
    follower.pump()
    with (tmp_path / "workerlog.0").open("wb") as log:
        log.write(b"one\n")
        log.flush()
        follower.pump()
        log.write(b"50%\r100%")
    follower.close()
    assert b"".join(screen.shown) == b"one\n50%\r100%\n"
    assert screen.left_out == 0


def test_a_slow_reader_gets_everything_and_a_blocked_one_the_number_of_missed_lines(tmp_path: Path) -> None:
    path = tmp_path / "workerlog.0"
    path.write_bytes(b"x" * 65_535 + b"\n" + b"y" * 65_535 + b"\n" + b"z\nz\nz\n")
    slow, stuck = Screen(room=1, reads=9), Screen(room=1)
    for screen in (slow, stuck):
        follower = follower_on(screen, path)
        for _ in range(3):
            follower.pump()
        assert len(screen.shown) == 1
        follower.close()
    assert b"".join(slow.shown) == path.read_bytes()
    assert (slow.left_out, stuck.left_out) == (0, 4)
