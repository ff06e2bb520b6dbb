"""docs/training.md keeps its word beyond its commands, which tests/integration/test_docs.py runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, clean_environ

PAGE = ROOT / "docs" / "training.md"


def test_page_lists_the_scalars_that_are_written(tmp_path: Path) -> None:
    arguments = "tools/train.py --model mlp --data synthetic --epochs 1 --output_dir".split()
    subprocess.run([sys.executable, *arguments, str(tmp_path)], cwd=ROOT, env=clean_environ(), check=True)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tags = {tag for record in records for tag in record} - {"step", "time", "epoch"}
    assert len(tags) == 9
    assert sorted(tag for tag in tags if f"`{tag}`" not in PAGE.read_text()) == []


def test_example_is_true() -> None:
    (example,) = fenced_blocks(PAGE.read_text(), "python")
    exec(compile(example, str(PAGE), "exec"), {})
