"""Metric sinks: records that survive a restart and a full disk, and a VisualDL that may be absent or broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from visualdl import LogReader

from fleet_train.train.metrics import JsonLinesSink, NullSink, VisualDLSink, open_sinks


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def visualdl_values(folder: Path, kind: str, tag: str) -> list[Any]:
    return list(LogReader(file_path=str(folder / "vdlrecords.train.log")).get_data(kind, tag))


def checkered(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    board = np.indices((size, size)).sum(axis=0) % 2 * 200
    return np.stack([board, board, np.zeros_like(board)], axis=2).astype(np.uint8)


def test_each_record_is_one_line_with_step_and_time(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path)
    sink.write(10, {"train/loss": 0.5, "train/bad": float("nan")})
    found = records(tmp_path)  # before close: somebody may be following the file
    sink.close()
    assert [(r["step"], r["train/loss"], r["train/bad"]) for r in found] == [(10, 0.5, None)]
    assert found[0]["time"] > 1e9


def test_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    JsonLinesSink(tmp_path).close()
    assert records(tmp_path) == []


def test_resumed_run_drops_records_after_its_step_and_half_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\nnot json\n{"step": 20}\n{"step": 30}\n{"step": 2')
    sink = JsonLinesSink(tmp_path, resume_step=20)
    sink.write(25, {})
    sink.close()
    assert [record["step"] for record in records(tmp_path)] == [10, 20, 25]


def test_everything_is_in_both_and_no_restart_adds_a_file(tmp_path: Path) -> None:
    for first_step in (0, 10):
        sink = open_sinks(tmp_path, reporting=True, resume_step=first_step)
        sink.hparams({"lr": 0.1, "use_local_sgd": True, "name": f"from {first_step}"}, ["train/loss"])
        sink.text(first_step, "profile/yaml", f"nccl_comm_num: 2 # {first_step}")
        for step in (10, 20):
            sink.write(first_step + step, {"train/loss": 1.0 / step})
        sink.image(first_step + 20, "test/confusion", checkered(8))
        sink.close()

    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["images/test_confusion.png", "metrics.jsonl", "visualdl/vdlrecords.train.log"]
    assert (np.asarray(Image.open(tmp_path / "images" / "test_confusion.png")) == checkered(8)).all()
    found = records(tmp_path)
    assert [(r["step"], r["train/loss"]) for r in found if "train/loss" in r] == [(10, 0.1), (20, 0.1), (30, 0.05)]
    assert [r["text"] for r in found if r.get("kind") == "text"] == ["nccl_comm_num: 2 # 0", "nccl_comm_num: 2 # 10"]
    assert [r["hparams"]["name"] for r in found if r.get("kind") == "hparams"] == ["from 0", "from 10"]
    assert [(r["step"], r["file"]) for r in found if r.get("kind") == "image"] == [(30, "images/test_confusion.png")]

    visualdl = tmp_path / "visualdl"
    assert [(v.id, round(v.value, 6)) for v in visualdl_values(visualdl, "scalar", "train/loss")] == [
        (10, 0.1),
        (20, 0.1),
        (30, 0.05),
    ]
    assert [v.id for v in visualdl_values(visualdl, "text", "profile/yaml")] == [0, 10]
    (first, _) = visualdl_values(visualdl, "text", "profile/yaml")
    assert first.text.encoded_text_string == "nccl_comm_num:\u20072\u2007#\u20070".ljust(120, "\u2007")
    (settings,) = visualdl_values(visualdl, "hyper_parameters", "hparam")
    assert [info.string_value for info in settings.hparam.hparamInfos if info.name == "name"] == ["from 10"]
    assert [v.id for v in visualdl_values(visualdl, "image", "test/confusion")] == [30]


def test_each_line_of_a_text_starts_a_line_of_the_page_and_none_is_longer(tmp_path: Path) -> None:
    sink = VisualDLSink(tmp_path)
    sink.text(0, "plan/table", f"first\n\n  second {'word ' * 40}end\nlast")
    sink.close()
    (text,) = visualdl_values(tmp_path, "text", "plan/table")
    lines = [line.replace("\u2007", " ").rstrip() for line in text.text.encoded_text_string.split(" ")]
    assert {len(line) for line in text.text.encoded_text_string.split(" ")} == {120}
    assert [line[:9] for line in lines] == ["first", "", "  second ", "      wor", "last"]
    assert lines[3].endswith(" word end")


def test_record_that_a_kill_has_cut_off_does_not_spoil_the_ones_behind_it(tmp_path: Path) -> None:
    sink = VisualDLSink(tmp_path)
    sink.write(1, {"train/loss": 1.0})
    sink.write(2, {"train/loss": 2.0})
    sink.close()
    log = tmp_path / VisualDLSink.FILE_NAME
    log.write_bytes(log.read_bytes()[:-5])
    resumed = VisualDLSink(tmp_path, resume_step=9)
    resumed.write(10, {"train/loss": 3.0})
    resumed.close()
    assert [(v.id, v.value) for v in visualdl_values(tmp_path, "scalar", "train/loss")] == [(1, 1.0), (10, 3.0)]


def test_a_full_disk_leaves_records_out_whole_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = JsonLinesSink(tmp_path)
    sink.write(1, {"train/loss": 1.0})
    real = sink._file._file

    class FullDisk:
        """Takes the first five bytes of each record and no more."""

        truncate, close = real.truncate, real.close

        def write(self, data: bytes) -> int:
            return real.write(data[:5])

    monkeypatch.setattr(sink._file, "_file", FullDisk())
    sink.write(2, {"train/loss": 2.0})
    sink.write(3, {"train/loss": 3.0})
    monkeypatch.setattr(sink._file, "_file", real)
    sink.write(4, {"train/loss": 4.0})
    sink.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 4]
    assert capsys.readouterr().err.count("misses records: only 5 of") == 1


def test_tags_that_no_page_can_show_are_refused(tmp_path: Path) -> None:
    sink = open_sinks(tmp_path, reporting=True)
    with pytest.raises(ValueError, match="'speed/data_%' is not a tag"):
        sink.write(1, {"speed/data_%": 1.0})
    with pytest.raises(ValueError, match="percent sign"):
        sink.hparams({"50%": 1}, [])
    sink.close()


def test_missing_visualdl_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("visualdl", "visualdl.component"):
        monkeypatch.setitem(sys.modules, name, None)
    sink = VisualDLSink(tmp_path)
    for step in range(3):
        sink.write(step, {"train/loss": 1.0})
        sink.image(step, "test/confusion", checkered(2))
    sink.close()
    said = capsys.readouterr().err
    assert said.count("no VisualDL curves") == 1
    assert "pip install visualdl" in said


def test_breaking_visualdl_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("incompatible protobuf")

    fake: Any = ModuleType("visualdl.component")
    head = SimpleNamespace(SerializeToString=lambda: b"")
    fake.base_component = SimpleNamespace(meta_data=lambda **_: head, scalar=fail, hparam=fail)
    monkeypatch.setitem(sys.modules, "visualdl.component", fake)
    sink = VisualDLSink(tmp_path)
    sink.write(1, {"train/loss": 1.0})
    sink.hparams({}, [])
    sink.close()
    assert capsys.readouterr().err.count("incompatible protobuf") == 1


def test_ranks_that_do_not_report_write_nothing(tmp_path: Path) -> None:
    sink = open_sinks(tmp_path / "out", reporting=False)
    assert isinstance(sink, NullSink)
    sink.write(1, {"train/loss": 1.0})
    sink.image(1, "test/confusion", checkered(2))
    sink.close()
    assert list(tmp_path.iterdir()) == []
