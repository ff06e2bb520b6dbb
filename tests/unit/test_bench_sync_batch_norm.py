"""The arithmetic of the benchmark of synchronised batch norm, and that a record survives an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import bench_sync_batch_norm
from tools.bench_sync_batch_norm import main, page, summarise


def round_of(plain: list[float], synchronised: list[float]) -> dict[str, Any]:
    """One rank's blocks; processor time is a half of the whole."""
    times = [*(("plain", each) for each in plain), *(("synchronised", each) for each in synchronised)]
    blocks = [{"kind": kind, "seconds": each, "processor_seconds": each / 2} for kind, each in times]
    return {"network": "convnet", "load_average": 1.5, "exchanges": 6, "ranks": [blocks]}


# The machine is half as fast in the second round, and one block was held up.
ROUNDS = [round_of([1.0, 1.0, 9.0], [1.2, 1.2, 1.2]), round_of([2.0, 2.0, 2.0], [2.8, 2.8, 30.0])]


def test_ratios_are_of_medians_in_the_same_round() -> None:
    found = summarise(ROUNDS, steps=10)
    step = found["step_ms"]
    assert (step["plain"], step["synchronised"]) == (150.0, 200.0)
    assert (step["ratio"], step["ratios"]) == (1.3, [1.2, 1.4])
    assert found["processor_ms"]["plain"] == 75.0


def test_a_record_is_written_after_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter(ROUNDS)
    monkeypatch.setattr(bench_sync_batch_norm, "measure", lambda *_: next(rounds))
    with pytest.raises(StopIteration):
        main(["--networks", "convnet", "--rounds", "3", "--steps", "10", "--record", str(tmp_path / "record")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert [each["round"] for each in record["rounds"]] == [0, 1]
    text = (tmp_path / "record.md").read_text()
    assert text == page(record)
    assert "| convnet | 32 | 6 | 150 ms | 200 ms | 426.7 -> 320.0 | 1.30 (1.20 to 1.40) | 75 ms |" in text
    assert "median over 2 rounds" in text
