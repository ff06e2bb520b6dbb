from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_train.convert import persistables
from fleet_train.convert.persistables import DESCRIPTION, RANKS, TENSORS
from fleet_train.convert.program_state import SavedState, fit, mean_of_ranks, refuse_damaged_position
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import manager, storage
from tests.unit.fuzz import check, fixed, mutated

OURS = {
    "w": ("parameter", [3, 4], "float32"),
    "w_velocity_0": ("optimizer", [3, 4], "float32"),
    "step": ("optimizer", [1], "int64"),
}
SAVED = SavedState(
    {
        "w": np.arange(12, dtype="float32").reshape(3, 4),
        "step": np.array([7], "int64"),
        "fleet_train/step": np.array([7]),
        "fleet_train/int8/step": np.array([7]),
        "fleet_train/local_sgd/numbers": np.array([4.0, 1.0, 0.1, 2.0]),
    },
    {"w": "parameter", "step": "optimizer"},
    [{"fleet_train/int8/w.error": np.full(12, rank, "float32")} for rank in range(2)],
)
STATE = {
    **dict.fromkeys(("epoch", "step", "steps_per_epoch", "world_size", "consumed_samples"), 3),
    **{name: {"name": "x"} for name in ("scheduler", "config", "profile", "versions")},
    "epoch_losses": [[0.5, 2], [0.25, 1]],
}
WEIRD: tuple[Any, ...] = (
    None, True, False, -1, 0, 0.5, 1e300, 2**53, 2**63, 2**64, 10**30, "", "x", "\x1b[31m", "../../x", "\0",
    "rank 9/w", [], {}, [[]], [-1], [2**40, 2**40], [1.5], ["3"], [True], {"w": {}}, float("nan"), float("inf"),
    "float32", "O", "V8", "float128", "datetime64[s]", "a" * 64, "rank 0/w",
)  # fmt: skip
TOKENS = (
    b"[" * 2_000, b"{", b"}", b'"', b"null", b"-", b"1e999", b"NaN", b"\xff", b"\x00" * 8, b"\xff" * 8, b"\\ud800",
)  # fmt: skip


def valid(folder: Path) -> Path:
    """A published checkpoint with the state of two ranks."""
    draft = storage.begin(folder, 3)
    tensors = persistables.write_tensors(draft, SAVED)
    return storage.publish(folder, 3, STATE, 0.5, storage.TrainingRun(), tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return valid(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_all(folder: Path) -> None:
    """What a resume does with the files before it changes anything; a CheckpointError may stop it at any point."""

    def resume() -> None:
        manager._checked(folder, storage.read(folder).state)
        found = persistables.read_folder(folder)
        refuse_damaged_position(found.arrays, str(folder))
        fit(found.describe(), OURS, str(folder))
        mean_of_ranks(found.ranks) if found.ranks else None

    assert len(check(resume, CheckpointError)) < 10_000


@fixed(250)
@given(st.data())
def test_files_with_something_changed(folder: Path, files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(files)))
    content = data.draw(mutated(st.just(files[name]), TOKENS))
    restore(folder, files)
    (folder / name).write_bytes(content)
    read_all(folder)


@fixed(250)
@given(st.data())
def test_headers_and_json_with_another_value(folder: Path, files: dict[str, bytes], data: st.DataObject) -> None:
    restore(folder, files)
    name = data.draw(st.sampled_from(sorted(files)))
    head, text, rest = parts(files[name]) if name in (TENSORS, RANKS) else (b"", files[name], b"")
    value = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        value = changed(data, value)
    text = json.dumps(value).encode()
    written = (len(text).to_bytes(8, "little") if head else b"") + text + rest
    if not head and isinstance(value, dict) and value:
        value.pop("sha256", None)  # what comes behind that check is looked at, too
        written = persistables.sealed(value or {"": 0})
    (folder / name).write_bytes(written)
    read_all(folder)


def restore(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def parts(content: bytes) -> tuple[bytes, bytes, bytes]:
    """Length, header and tensors of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return content[:8], content[8:end], content[end:]


def changed(data: st.DataObject, value: Any) -> Any:
    """The value with one thing in it replaced, removed, renamed or added."""
    if not isinstance(value, (dict, list)) or not value or data.draw(st.integers(0, 9)) == 0:
        return data.draw(st.sampled_from(WEIRD))
    if isinstance(value, list):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], changed(data, value[at]), *value[at + 1 :]]
    key = data.draw(st.sampled_from(sorted(value)))
    kind = data.draw(st.sampled_from(("inside", "inside", "inside", "remove", "rename", "twin")))
    others = {name: one for name, one in value.items() if name != key or kind == "twin"}
    if kind == "remove":
        return others
    name = key if kind == "inside" else data.draw(st.sampled_from([one for one in WEIRD if isinstance(one, str)]))
    return {**others, name: changed(data, value[key]) if kind == "inside" else value[key]}


def test_a_description_of_what_is_there_is_read(folder: Path, files: dict[str, bytes]) -> None:
    restore(folder, files)
    assert persistables.read_folder(folder).kinds == SAVED.kinds
    assert {DESCRIPTION, TENSORS, RANKS} == files.keys()
