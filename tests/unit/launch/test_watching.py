from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from fleet_train.launch import launcher
from fleet_train.launch.node import Node
from fleet_train.launch.terminal import Follower

NODE = Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0")


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

    monkeypatch.setattr(launcher, "connections_at", connections_at)
    connections = launcher.Connections(NODE)
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
