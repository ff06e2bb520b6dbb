"""The trainer's pages beyond their commands, which tests/integration/test_docs.py runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, clean_environ

pytestmark = pytest.mark.long

PAGES = [ROOT / "docs" / "training.md", ROOT / "docs" / "checkpoints.md"]


@pytest.mark.parametrize("example", [block for page in PAGES for block in fenced_blocks(page.read_text(), "python")])
def test_example_is_true(example: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", example]  # in a process of its own: it may join a job
    subprocess.run(command, cwd=tmp_path, env=clean_environ(), check=True, timeout=180)
