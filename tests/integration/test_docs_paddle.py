"""The statements of docs/paddle.md hold for the installed Paddle: its examples run, and the names in it exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, clean_environ

PAGE = (ROOT / "docs" / "paddle.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:fleet_train|tests)/[\w/.]+)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize("example", fenced_blocks(PAGE, "python"))
def test_example_is_true(example: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", example]  # each changes the process: its mode, its flags, its hooks
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("path", "test"), NAMED)
def test_named_code_exists(path: str, test: str) -> None:
    assert (ROOT / path).exists()
    assert not test or f"def {test}(" in (ROOT / path).read_text()
