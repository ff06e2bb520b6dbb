"""The examples of docs/spawn.md run, or fail, as printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, Ended, Job, clean_environ, python, write_script

pytestmark = pytest.mark.long

PAGE = (ROOT / "docs" / "spawn.md").read_text()


def run(example: str, folder: Path) -> Ended:
    with Job(folder / "job") as job:
        job.start("example", python(str(write_script(example, folder))), clean_environ())
        (ended,) = job.wait(100)
        assert job.orphans() == []
        return ended


def test_the_first_example_trains_on_two_ranks(tmp_path: Path) -> None:
    example = next(block for block in fenced_blocks(PAGE, "python") if "SGD" in block)
    ended = run(example, tmp_path)
    assert ended.exit_code == 0, ended.output
    one, other = ended.output.splitlines()[-1].strip("[]").split(", ")
    assert one == other
    assert float(one) < 1.0


def test_the_failing_example_fails_as_printed(tmp_path: Path) -> None:
    example = next(block for block in fenced_blocks(PAGE, "python") if "len(samples)" in block)
    (shown,) = fenced_blocks(PAGE, "text")
    ended = run(example, tmp_path)
    assert ended.exit_code == 1
    assert [line for line in shown.splitlines() if line not in ended.output] == []
    assert "fleet_train.errors.RankFailed: rank 1 of 2 failed first" in ended.output
