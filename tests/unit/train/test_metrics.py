"""Metric sinks: JSON lines that survive a restart, and a VisualDL that may be absent or broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fleet_train.train.metrics import JsonLinesSink, NullSink, VisualDLSink, open_sinks


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_one_line_with_step_and_time(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink.write(10, {"train/loss": 0.5})
    found = records(tmp_path / "metrics.jsonl")  # before close: somebody may be following the file
    sink.close()
    assert [(r["step"], r["train/loss"]) for r in found] == [(10, 0.5)]
    assert found[0]["time"] > 1e9


def test_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonLinesSink(path).close()
    assert records(path) == []


def test_resumed_run_drops_records_after_its_step_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\nnot json\n{"step": 20}\n{"step": 30}\n{"step": 2')
    sink = JsonLinesSink(path, resume_step=20)
    sink.write(25, {})
    sink.close()
    assert [record["step"] for record in records(path)] == [10, 20, 25]


def test_missing_visualdl_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "visualdl", None)
    sink = VisualDLSink(tmp_path)
    for step in range(3):
        sink.write(step, {"train/loss": 1.0})
    sink.close()
    said = capsys.readouterr().err
    assert said.count("no VisualDL curves") == 1
    assert "pip install visualdl" in said


def test_breaking_visualdl_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    fake: Any = ModuleType("visualdl")
    fake.LogWriter = lambda *_, **__: SimpleNamespace(add_scalar=fail, close=fail)
    monkeypatch.setitem(sys.modules, "visualdl", fake)
    sink = VisualDLSink(tmp_path)
    sink.write(1, {"train/loss": 1.0})
    sink.write(2, {"train/loss": 1.0})
    sink.close()
    assert capsys.readouterr().err.count("disk full") == 1


def test_ranks_that_do_not_report_write_nothing(tmp_path: Path) -> None:
    sink = open_sinks(tmp_path / "out", reporting=False)
    assert isinstance(sink, NullSink)
    sink.write(1, {"train/loss": 1.0})
    sink.close()
    assert list(tmp_path.iterdir()) == []
