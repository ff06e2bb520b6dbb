"""The notebook runs as printed, and its output is what its text promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import ROOT, Job, clean_environ, python

pytestmark = pytest.mark.long

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_every_cell_of_the_notebook_runs_and_shows_what_its_text_says(tmp_path: Path) -> None:
    runner, written = ROOT / "tests" / "integration" / "run_notebook.py", tmp_path / "printed.json"
    with Job(tmp_path / "job") as job:
        job.start("notebook", python(str(runner), str(NOTEBOOK), str(written)), clean_environ())
        (ended,) = job.wait(150)
        assert ended.exit_code == 0, ended.output
        assert job.orphans() == []
    defining, training, curve, mistake = json.loads(written.read_text())
    assert defining == ""
    steps = [line for line in training.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in steps] == [f"step {step}" for step in range(0, 100, 20)]
    same, numbers = curve.splitlines()
    assert same == "the same on both ranks: True"
    losses = [float(number) for number in numbers.split()]
    assert len(losses) == 10
    assert losses[-1] < 0.2 * losses[0], "nothing was learned"
    first, *rest = mistake.splitlines()
    assert first.startswith("rank 1 of 2 failed first: ZeroDivisionError: division by zero, after ")
    assert any("return sum(samples) / len(samples)" in line for line in rest), "the traceback shows the cell's line"


def test_the_file_holds_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
