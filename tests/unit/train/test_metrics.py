"""Metric sinks: records that survive a restart and a full disk, a VisualDL that may be absent or broken, users' own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from visualdl import LogReader

from fleet_train.errors import FleetTrainError
from fleet_train.train.dashboard import find_runs, read_curves, table
from fleet_train.train.metrics import JsonLinesSink, NullSink, VisualDLSink, open_sinks, sinks_of


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def visualdl_values(folder: Path, kind: str, tag: str) -> list[Any]:
    return list(LogReader(file_path=str(folder / "vdlrecords.train.log")).get_data(kind, tag))


def checkered(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    board = np.indices((size, size)).sum(axis=0) % 2 * 200
    return np.stack([board, board, np.zeros_like(board)], axis=2).astype(np.uint8)


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
    shown = [(v.id, round(v.value, 6)) for v in visualdl_values(visualdl, "scalar", "train/loss")]
    assert shown == [(10, 0.1), (20, 0.1), (30, 0.05)]
    assert [v.id for v in visualdl_values(visualdl, "text", "profile/yaml")] == [0, 10]
    (first, _) = visualdl_values(visualdl, "text", "profile/yaml")
    assert first.text.encoded_text_string == "nccl_comm_num:\u20072\u2007#\u20070".ljust(120, "\u2007")
    (settings,) = visualdl_values(visualdl, "hyper_parameters", "hparam")
    assert [info.string_value for info in settings.hparam.hparamInfos if info.name == "name"] == ["from 10"]
    assert [v.id for v in visualdl_values(visualdl, "image", "test/confusion")] == [30]


def test_record_that_a_kill_has_cut_off_does_not_spoil_the_ones_behind_it(tmp_path: Path) -> None:
    log = tmp_path / VisualDLSink.FILE_NAME
    for resume_step, steps in ((0, (1, 2)), (9, (10,))):
        sink = VisualDLSink(tmp_path, resume_step=resume_step)
        for step in steps:
            sink.write(step, {"train/loss": float(step)})
        sink.close()
        if resume_step == 0:
            log.write_bytes(log.read_bytes()[:-5])
    assert [(v.id, v.value) for v in visualdl_values(tmp_path, "scalar", "train/loss")] == [(1, 1.0), (10, 10.0)]


def test_a_full_disk_leaves_records_out_whole_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = JsonLinesSink(tmp_path)
    sink.write(1, {"train/loss": 1.0})
    real = sink._file._file

    full = SimpleNamespace(truncate=real.truncate, close=real.close, write=lambda data: real.write(data[:5]))
    monkeypatch.setattr(sink._file, "_file", full)
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


def test_a_record_is_one_line_with_step_and_time_and_a_resumed_run_drops_later_ones_and_half_lines(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    sink = JsonLinesSink(tmp_path)
    sink.write(10, {"train/loss": 0.5, "train/bad": float("nan")})
    (found,) = records(tmp_path)  # before close: somebody may be following the file
    sink.close()
    assert (found["step"], found["train/loss"], found["train/bad"]) == (10, 0.5, None)
    assert found["time"] > 1e9
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\nnot json\n{"step": 20}\n{"step": 30}\n{"step": 2')
    sink = JsonLinesSink(tmp_path, resume_step=20)
    sink.write(25, {})
    sink.close()
    assert [record["step"] for record in records(tmp_path)] == [10, 20, 25]


@pytest.mark.parametrize("is_there", [False, True])
def test_missing_or_breaking_visualdl_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    fail = Mock(side_effect=RuntimeError("incompatible protobuf"))
    fake: Any = ModuleType("visualdl.component")
    head = SimpleNamespace(SerializeToString=lambda: b"")
    fake.base_component = SimpleNamespace(meta_data=lambda **_: head, scalar=fail, hparam=fail, image=fail)
    for name in ("visualdl", "visualdl.component"):
        monkeypatch.setitem(sys.modules, name, fake if is_there else None)
    sink = VisualDLSink(tmp_path)
    for step in range(3):
        sink.write(step, {"train/loss": 1.0})
        sink.hparams({}, [])
        sink.image(step, "test/confusion", checkered(2))
    sink.close()
    said = capsys.readouterr().err
    assert said.count("no VisualDL curves") == 1
    assert ("incompatible protobuf" if is_there else "pip install visualdl") in said


class Kept:
    """What a user writes."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, scalars: Any) -> None:
        self.records.append((step, dict(scalars)))

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("wrong", [[3], [Kept], ["metrics.jsonl"], [object()], 3])
def test_what_is_no_sink_is_refused_before_training(wrong: Any) -> None:
    with pytest.raises(FleetTrainError, match=r"is not a sink: it takes an object with write\(step, scalars\) and"):
        sinks_of(wrong, reporting=False)


def test_ranks_that_do_not_report_call_and_write_nothing(tmp_path: Path) -> None:
    kept = Kept()
    for sinks in (sinks_of([kept], reporting=False), open_sinks(tmp_path / "out", reporting=False)):
        assert isinstance(sinks, NullSink)
        sinks.write(1, {"train/loss": 1.0})
        sinks.image(1, "test/confusion", checkered(2))
        sinks.close()
    assert (kept.records, kept.closed, list(tmp_path.iterdir())) == ([], 0, [])


def test_whole_sinks_go_into_a_list_and_others_get_what_they_have_a_method_for(tmp_path: Path) -> None:
    class WithText(Kept):
        def text(self, step: int, tag: str, text: str) -> None:
            self.records.append((step, {tag: float(len(text))}))

    kept = WithText()
    sinks = sinks_of([open_sinks(tmp_path, reporting=True), kept], reporting=True)
    sinks.hparams({"lr": 0.1}, [])
    sinks.text(2, "plan/table", "abc")
    sinks.image(2, "test/confusion", checkered(8))
    sinks.write(3, {"train/loss": 0.5})
    sinks.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4
    assert kept.records == [(2, {"plan/table": 3.0}), (3, {"train/loss": 0.5})]
    whole = NullSink()
    assert sinks_of(whole, reporting=True) is whole
    assert isinstance(sinks_of(None, reporting=True), NullSink)


def test_lines_that_are_no_record_are_left_out_and_names_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    lines = ["[]", "7", "[" * 100_000, '{"a/b": 1}', '{"step": "x", "a/b": 1}', '{"step": 3, "a/b": "x", "a/c": 1e999}']
    lines += [json.dumps({"step": 4, "\x1b[2Ja/d": 10**5, "a/e": True})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_curves(tmp_path / "metrics.jsonl") == (4, {"\\x1b[2Ja/d": [1e5], "a/e": [1.0]})


def test_only_a_file_of_bounded_size_is_read_and_a_pipe_in_its_place_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    for what in ("pipe", "/dev/zero", "endless"):
        log.unlink(missing_ok=True)
        if what == "pipe":
            os.mkfifo(log)
        elif what == "endless":
            with log.open("wb") as file:
                file.truncate(1 << 42)
        else:
            log.symlink_to(what)
        assert f"{tmp_path}: its metrics.jsonl cannot be read: " in table(tmp_path)
        assert find_runs([tmp_path]) == [tmp_path]
    log.unlink()
    os.mkfifo(log)
    open_sinks(tmp_path, True, resume_step=5).close()
    assert log.is_file()
    log.write_text('{"step": 1' + "0" * 3000 + ', "a/b": 1}\n{"step": 1' + "0" * 5000 + ', "a/b": 2}\n')
    assert table(tmp_path).splitlines()[0] == f"{tmp_path}, step 0"


def test_table_has_scalars_only_and_bears_a_half_line_or_no_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert table(tmp_path) == f"{tmp_path}: no record yet"
    lines = ['{"step": 0, "time": 1, "kind": "text", "tag": "plan/table", "text": "x"}']
    lines += ['{"step": 10, "train/loss": 2.0}', '{"step": 20, "train/loss": 0.5, "test/loss": null}', '{"step": 30,']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_curves(tmp_path / "metrics.jsonl") == (20, {"train/loss": [2.0, 0.5]})
    head, columns, row = table(tmp_path).splitlines()
    assert head == f"{tmp_path}, step 20"
    assert columns.split() == ["newest", "lowest", "highest"]
    assert row.split() == ["train/loss", "0.5", "0.5", "2", "█▁"]
