"""The line that ends a failure report: at most one, and none where nothing is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_train.doctor import report
from fleet_train.doctor.report import AfterFailure
from fleet_train.launch.node import Node

ALONE = Node(("127.0.0.1",), 0, 6170, 1, None, "lo")
TWO = Node(("127.0.0.2", "127.0.0.3"), 0, 6170, 1, None, "lo")


def test_nothing_where_nothing_is_found(tmp_path: Path, free_ports: Callable[..., int]) -> None:
    del free_ports
    assert AfterFailure(ALONE, tmp_path).line() == ""
    assert AfterFailure(TWO, tmp_path).line() == ""  # a node that refuses is there


def test_a_process_that_was_killed_for_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = AfterFailure(ALONE, tmp_path)
    monkeypatch.setattr(report, "oom_kills", lambda: asked._kills + 1)
    line = asked.line()
    assert line.startswith("doctor: FAIL  memory  node 0 (127.0.0.1): ")
    assert "1 processes were killed for lack of memory" in line
    assert line.endswith("; more: python -m fleet_train doctor")
    assert "\n" not in line


def test_a_node_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(report, "connect_from", silent)
    line = AfterFailure(TWO, tmp_path).line()
    assert "FAIL  port  node 0 (127.0.0.2) -> node 1 (127.0.0.3): a connection to port 6171: timed out" in line
    assert line.endswith("python -m fleet_train doctor --ips 127.0.0.2,127.0.0.3")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.measure_machine, "space_of", lambda _: (1 << 40, 5000))
    assert (
        f"FAIL  disk  node 0 (127.0.0.1): {tmp_path} (logs): 5 kB free" in AfterFailure(ALONE, tmp_path / "log").line()
    )


def test_killed_processes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfree 1\noom_kill 3\n")
    assert report.oom_kills(tmp_path / "vmstat") == 3
    assert report.oom_kills(tmp_path / "none") == 0
    assert os.path.exists("/proc/vmstat")
