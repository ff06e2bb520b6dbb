"""The data-pipeline benchmark: what its figures mean, and that both contestants read the same images."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT, clean_environ
from tools.bench_data import summarise, table


def turn(contestant: str, number: int, speed: float, cpu: float) -> dict[str, object]:
    return {
        "contestant": contestant,
        "workers": 2,
        "round": number,
        "images_per_second": speed,
        "cpu_ms_per_image": cpu,
    }


def test_ratios_are_taken_within_a_round_and_then_the_median() -> None:
    # The machine is half as fast in round 2: medians of the speeds alone would compare different rounds.
    ours = [turn("ours", 1, 200, 2.0), turn("ours", 2, 100, 2.0), turn("ours", 3, 220, 2.2)]
    theirs = [turn("paddle", 1, 100, 4.0), turn("paddle", 2, 50, 4.0), turn("paddle", 3, 100, 4.0)]
    first, second = summarise([*ours, *theirs])
    assert (first["images_per_second"], first["slowest"], first["fastest"]) == (200, 100, 220)
    assert (first["speed_over_paddle"], first["cpu_over_paddle"]) == (2.0, 0.5)
    assert (second["speed_over_paddle"], second["contestant"]) == (1.0, "paddle")
    assert "| ours | 2 | 200 (100 to 220) | 2.00 | 2.00 | 0.50 |" in table([first, second])


def test_without_the_rival_there_is_no_ratio() -> None:
    [row] = summarise([turn("ours", 1, 200, 2.0)])
    assert row["speed_over_paddle"] is None
    assert table([row]).endswith("| ours | 2 | 200 (200 to 200) |  | 2.00 |  |")


def test_quick_run_measures_both_and_writes_the_record(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/bench_data.py"), "--quick", "--output", str(tmp_path / "record")]
    done = subprocess.run(command, env=clean_environ(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    ours, theirs = record["turns"]
    assert (ours["images"], theirs["images"]) == (128, 128)
    # Random crops of the same images, normalised alike: about the same mean, far from that of other units.
    assert abs(ours["mean_of_values"] - theirs["mean_of_values"]) < 0.1
    assert str(tmp_path) not in (tmp_path / "record.md").read_text().split("Command")[0]
