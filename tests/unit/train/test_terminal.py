"""Curves for a terminal, from a file that is still being written."""

from __future__ import annotations

import json
from pathlib import Path

from fleet_train.train.dashboard import read_curves, sparkline, table


def test_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"


def test_table_has_scalars_only_and_bears_a_half_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "time": 1, "kind": "text", "tag": "plan/table", "text": "x"}\n'
        '{"step": 10, "time": 2, "train/loss": 2.0}\n{"step": 20, "time": 3, "train/loss": 0.5, "test/loss": null}\n'
        '{"step": 30, "train/lo'
    )
    assert read_curves(tmp_path / "metrics.jsonl") == (20, {"train/loss": [2.0, 0.5]})
    head, columns, row = table(tmp_path).splitlines()
    assert head == f"{tmp_path}, step 20"
    assert columns.split() == ["newest", "lowest", "highest"]
    assert row.split() == ["train/loss", "0.5", "0.5", "2", "█▁"]


def test_run_without_a_record_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert table(tmp_path) == f"{tmp_path}: no record yet"


def test_lines_that_are_no_record_are_left_out_and_names_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    lines = ["[]", "7", "[" * 100_000, '{"a/b": 1}', '{"step": "x", "a/b": 1}', '{"step": 3, "a/b": "x", "a/c": 1e999}']
    lines += [json.dumps({"step": 4, "\x1b[2Ja/d": 10**5, "a/e": True})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_curves(tmp_path / "metrics.jsonl") == (4, {"\\x1b[2Ja/d": [1e5], "a/e": [1.0]})
