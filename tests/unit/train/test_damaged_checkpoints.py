"""Checkpoints that are damaged, or made to do harm: a CheckpointError names the file, soon, in little memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_train.convert import persistables
from fleet_train.convert.persistables import DESCRIPTION, RANKS, TENSORS, WAY_OUT
from fleet_train.convert.program_state import SavedState, refuse_damaged_position
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from tests.support import checkpoints
from tests.support.checkpoints import change, write_folder

pytestmark = pytest.mark.usefixtures("one_process")
ARRAYS = {"b": np.arange(3, dtype="float32"), "w": np.arange(12, dtype="float32").reshape(3, 4)}
KINDS = {"b": "parameter", "w": "parameter", "own": "optimizer"}
DEEP = "[" * 100_000
HUGE = "9" * 60_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = [{"own": np.full(2, rank, "float32")} for rank in range(2)]
    write_folder(tmp_path, SavedState(ARRAYS, KINDS, own))
    return tmp_path


def refusal(read: Callable[[], Any]) -> str:
    """The message for a checkpoint that must be refused, in less than 32 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read()
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).isprintable()
    return str(caught.value)


TEXTS = [b"", b"[]", b"\xff\xfe", DEEP.encode(), b'{"format": ' + HUGE.encode() + b"}", b"NaN"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_description_that_is_none_is_named(folder: Path, text: bytes) -> None:
    (folder / DESCRIPTION).write_bytes(text)
    message = refusal(lambda: persistables.read_folder(folder))
    assert message.startswith(f"{folder / DESCRIPTION} is damaged: ")
    assert message.endswith(f"; {WAY_OUT}")


def entry(**changed: Any) -> dict[str, Any]:
    return {"files": {TENSORS: {"w": {"dtype": "float32", "shape": [3, 4], "sha256": "ab", **changed}}}, "kinds": {}}


WRONG_SHAPES: list[Any] = [None, 12, [-3, -4], [True], [1.5], ["3"], [1 << 47, 1 << 47], [0, 1 << 47, 1 << 47]]
WRONG_SHAPES += [[10**4000], [1] * 100, [1 << 40], [0]]


@pytest.mark.parametrize(
    "changed",
    [
        *({"format": wrong} for wrong in (None, DEEP)),
        *({"files": wrong} for wrong in (None, [], {"/etc/passwd": {}}, {TENSORS: []}, {TENSORS: {"w": None}})),
        entry(extra=1),
        *(entry(dtype=wrong) for wrong in ("float31", "O", "S1000000000", ["float32"])),
        *(entry(shape=wrong) for wrong in WRONG_SHAPES),
        entry(sha256=None),
        *({"kinds": wrong} for wrong in ([], {"b": 7}, {"b": ["parameter"]}, {"nothing": "parameter"})),
        {"kinds": {"x_velocity_0": "optimizer"}},
        *({"ranks": wrong} for wrong in (None, -1, 1, True, 10**12, 2.0)),
    ],
    ids=lambda changed: repr(changed)[:80],
)
def test_an_entry_of_the_description_that_is_wrong_is_refused(folder: Path, changed: dict[str, Any]) -> None:
    change(folder, **changed)
    assert str(folder) in refusal(lambda: persistables.read_folder(folder))


@pytest.mark.parametrize("name", ["own", *(f"rank {number}/own" for number in ("2", "-1", "01", "x", HUGE)), ""])
def test_a_tensor_of_no_rank_is_refused(folder: Path, name: str) -> None:
    files = persistables.read_entries(folder)["files"]
    files[RANKS][name] = files[RANKS].pop("rank 1/own")
    change(folder, files=files)
    assert "complete.json is damaged" in refusal(lambda: persistables.read_folder(folder))


def with_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Put another header before the tensors of a file."""
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header if changed is None else changed).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])


@pytest.mark.parametrize(
    "change",
    [
        lambda _: DEEP.encode(),
        lambda _: b'{"w": ' + HUGE.encode() + b"}",
        lambda _: [],
        lambda header: header["w"].update(data_offsets=[1 << 62, (1 << 62) + 48]),
        lambda header: header["w"].update(shape=[12]),
        lambda header: header.pop("w") and None,
    ],
)
def test_a_header_that_fits_no_file_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with_header(folder / TENSORS, change)
    message = refusal(lambda: persistables.read_folder(folder))
    assert message.startswith(str(folder / TENSORS))
    assert message.endswith(f"; {WAY_OUT}")


def test_a_length_that_the_file_does_not_have_takes_no_memory(folder: Path) -> None:
    path = folder / TENSORS
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    assert "was altered before its first tensor 'b'" in refusal(lambda: persistables.read_folder(folder))
    with path.open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate((1 << 40) + 8)
    assert "was altered before its first tensor 'b'" in refusal(lambda: persistables.read_folder(folder))


def test_many_tensors_in_the_same_bytes_are_refused(folder: Path) -> None:
    files = persistables.read_entries(folder)["files"]
    files[TENSORS]["again"] = files[TENSORS]["w"]
    change(folder, files=files)
    with_header(folder / TENSORS, lambda header: header.update(again=header["w"]))
    assert "was altered before its first tensor 'b'" in refusal(lambda: persistables.read_folder(folder))


STATE = asdict(TrainState(1, 1, 1, 1, {}, {}, {}, {}))


def publish(output: Path, state: dict[str, Any]) -> Path:
    return checkpoints.publish(output / "checkpoints", 1, state)


@pytest.mark.parametrize("name", [DESCRIPTION, TENSORS, RANKS])
def test_pipes_are_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name} is not a regular file" in refusal(lambda: persistables.read_folder(folder))
    marker = publish(folder / "run", STATE) / storage.MARKER
    marker.unlink()
    os.mkfifo(marker)
    assert Checkpoints(folder / "run").newest() is None


NUMBERS = "fleet_train/local_sgd/numbers"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("fleet_train/step", value) for value in (np.empty(0), np.array([-1]), np.array([np.nan]), np.array([True]))),
        ("fleet_train/int8/step", np.zeros(2)),
        ("fleet_train/powersgd/step", np.array([1e300])),
        *((NUMBERS, value) for value in (np.zeros(1), np.array([np.inf, 0.0, 0.0, 0.0]), np.zeros(4))),
        (NUMBERS, np.array([1, 0, 0, 0])),
    ],
)
def test_a_position_that_is_none_is_refused(name: str, value: Any) -> None:
    assert name in refusal(lambda: refuse_damaged_position({name: value}, "runs/demo"))


def with_list(**entries: Any) -> dict[str, Any]:
    return {"data": {"classes": [], "lists": {"a": {"samples": 1, "ranks": 1, **entries}}}}


@pytest.mark.parametrize(
    "changed",
    [
        *({"step": wrong} for wrong in (None, -1, 1.5, True, 10**300)),
        {"steps_per_epoch": "10"},
        {"compared": "yes"},
        {"consumed_samples": [1]},
        {"scheduler": []},
        {"config": None},
        {"profile": "multi_node"},
        *({"epoch_losses": wrong} for wrong in (7, [[1.0]], [[1.0, "2"]], [None])),
        {"updates": -1},
        *({"data": wrong} for wrong in ([], {"classes": [], "lists": []}, {"classes": [1], "lists": {}})),
        with_list(),
        with_list(ranks=True, done=None),
        with_list(done=-1),
        {"strange": 1},
        {"\x1b[31m": 1},
    ],
    ids=lambda changed: repr(changed)[:80],
)
def test_an_entry_of_the_state_that_is_wrong_is_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    folder = publish(tmp_path, {**STATE, **changed})
    message = refusal(Checkpoints(tmp_path).newest)
    (name,) = changed
    assert message.startswith(f"{folder / 'complete.json'} is damaged in ")
    assert not name.isprintable() or f"'{name}'" in message


def test_an_entry_that_a_state_does_not_have_is_named(tmp_path: Path) -> None:
    publish(tmp_path, STATE)
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    assert found.state == TrainState(1, 1, 1, 1, {}, {}, {}, {})
    for name in ("scheduler", "batches"):
        publish(tmp_path, {key: value for key, value in STATE.items() if key != name})
        assert f"is damaged in '{name}'" in refusal(Checkpoints(tmp_path).newest)


@pytest.mark.parametrize("marker", [None, {}, {"format": 2}, {"format": 3, "files": {}}])
def test_a_marker_that_is_none_is_refused(tmp_path: Path, marker: Any) -> None:
    folder = publish(tmp_path, STATE)
    (folder / storage.MARKER).write_text(json.dumps(marker))
    for read in (Checkpoints(tmp_path).newest, Checkpoints(tmp_path).best):
        assert str(folder) in refusal(read)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        *(({"score": wrong}, "its score is not a number") for wrong in ("high", np.inf, np.nan, True, [1.0])),
        *(({"state": wrong}, "it has no state of a training") for wrong in (None, [], 7)),
    ],
)
def test_a_score_or_a_state_that_is_none_is_refused(tmp_path: Path, entries: dict[str, Any], said: str) -> None:
    change(publish(tmp_path, STATE), **entries)
    assert said in refusal(Checkpoints(tmp_path).best)
