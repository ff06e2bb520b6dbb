"""The examples and commands of docs/data.md run as printed, in order, in one folder."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import fenced_blocks
from tests.support.pages import table_of
from tests.support.ports import free_ports
from tests.support.processes import ROOT, clean_environ

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "data.md"


def test_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        environ = clean_environ()
        done = subprocess.run(
            words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    here = Path(__file__).relative_to(ROOT)
    mine = [command for command, test in table_of(PAGE).elsewhere.items() if test.startswith(f"{here}::")]
    folder, *examples = fenced_blocks(PAGE.read_text(), "python")
    run(sys.executable, "-c", folder)
    output = {}
    for command in mine:
        words = shlex.split(command)
        if "launch" in words:
            words.insert(words.index("launch") + 1, f"--started_port={free_ports(4)}")
        output[command] = run(*words)
    run(sys.executable, "-c", "\n".join(examples))
    launched, noise, *checks = output.values()
    assert "ResNet18 on ./images: 2 rank(s)" in launched
    assert "cnn on synthetic:3x32x32x10x640: 1 rank(s)" in noise
    assert all("images/train: 48 samples in 2 classes" in check for check in checks)
    assert "feeds    20 samples/s: yes" in checks[1]
