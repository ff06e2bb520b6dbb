"""Our safetensors files: the package reads them, and damage is attributed to the first damaged tensor."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fleet_train.convert import persistables
from fleet_train.errors import CheckpointError
from tests.support.processes import ROOT

PACKAGE = ROOT / "fleet_train"

ARRAYS = {
    "weight": np.arange(12, dtype="float32").reshape(3, 4),
    "count": np.array([7], "int64"),
    "scalar": np.array(0.5, "float64"),
    "bits": np.arange(5, dtype="uint16"),
    "flags": np.array([True, False]),
    "empty": np.empty((0, 3), "float32"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def test_package_reads_what_is_written(path: Path) -> None:
    persistables.write_safetensors(path, ARRAYS)
    found = load_file(path)
    assert sorted(found) == sorted(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_what_is_written_is_read_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistables, "_CHUNK", 7)  # tensors of several pieces
    contents = persistables.write_safetensors(path, ARRAYS)
    found = persistables.read_safetensors(path, contents)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_first_tensor_that_is_cut_off_is_named(path: Path) -> None:
    contents = persistables.write_safetensors(path, ARRAYS)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    cuts = {
        5: "before its first tensor 'weight'",
        begin - 1: "before its first tensor 'weight'",
        begin: "in tensor 'weight'",
        begin + 47: "in tensor 'weight'",
        begin + 48: "in tensor 'count'",
        len(whole) - 1: "in tensor 'flags'",
    }
    for size, where in cuts.items():
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=f"a.safetensors is cut off {where}"):
            persistables.read_safetensors(path, contents)


def test_every_altered_byte_is_noticed_and_put_down_to_a_tensor(path: Path) -> None:
    contents = persistables.write_safetensors(path, ARRAYS)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(begin, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"tensor '\w+' was altered"):
            persistables.read_safetensors(path, contents)
    path.write_bytes(whole[: begin + 50] + b"\x01" + whole[begin + 51 :])
    with pytest.raises(CheckpointError, match=r"tensor 'count' was altered after it was written \(SHA-256 differs\)"):
        persistables.read_safetensors(path, contents)


def test_an_altered_header_is_noticed(path: Path) -> None:
    contents = persistables.write_safetensors(path, ARRAYS)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(begin):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="was altered before its first tensor 'weight'"):
            persistables.read_safetensors(path, contents)


def test_dtype_without_a_code_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensors of dtype complex64 cannot be saved"):
        persistables.write_safetensors(path, {"c": np.zeros(2, "complex64")})


def test_nothing_that_saves_or_loads_knows_pickles() -> None:
    sources = [path for layer in ("collectives", "convert", "train") for path in (PACKAGE / layer).rglob("*.py")]
    readers = re.compile(
        r"\bimport pickle|\bpaddle\.(static\.)?(load|set_program_state)\(|allow_pickle|joblib|torch\.load"
    )
    assert len(sources) > 60
    assert [path.name for path in sources if readers.search(path.read_text())] == []
