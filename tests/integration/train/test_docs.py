"""docs/training.md keeps its word beyond its commands, which tests/integration/test_docs.py runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, clean_environ

PAGE = ROOT / "docs" / "training.md"


@pytest.mark.parametrize("example", fenced_blocks(PAGE.read_text(), "python"))
def test_example_is_true(example: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", example]  # in a process of its own: it may join a job
    subprocess.run(command, cwd=tmp_path, env=clean_environ(), check=True, timeout=60)
