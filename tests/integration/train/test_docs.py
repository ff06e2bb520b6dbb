"""docs/training.md keeps its word: its commands are run in their order, its example too."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.commands import fenced_blocks, shell_commands
from tests.support.ports import free_ports
from tests.support.processes import ROOT, clean_environ

PAGE = ROOT / "docs" / "training.md"


def run_as_printed(command: str, folder: Path) -> str:
    program, *arguments = shlex.split(command)
    assert program == "python"
    if "launch" in arguments:  # other tests may use the default port at the same time
        arguments.insert(arguments.index("launch") + 1, f"--started_port={free_ports(3)}")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=clean_environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands_do_what_the_page_says(tmp_path: Path) -> None:
    first, resumed, launched = shell_commands(PAGE.read_text())
    run_as_printed(first, tmp_path)
    assert "(epoch 4, step 180)" in run_as_printed(resumed, tmp_path)
    assert "2 rank(s) on 1 node(s)" in run_as_printed(launched, tmp_path)
    one, two = (json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("digits", "two"))
    assert (one["world_size"], one["epochs"]) == (1, 6)
    assert (two["world_size"], two["num_nodes"], two["profile"]) == (2, 1, "single_node")


def test_page_lists_the_scalars_that_are_written(tmp_path: Path) -> None:
    arguments = "tools/train.py --model mlp --data synthetic --epochs 1 --output_dir".split()
    subprocess.run([sys.executable, *arguments, str(tmp_path)], cwd=ROOT, env=clean_environ(), check=True)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tags = {tag for record in records for tag in record} - {"step", "time", "epoch"}
    assert len(tags) == 8
    assert sorted(tag for tag in tags if f"`{tag}`" not in PAGE.read_text()) == []


def test_example_is_true() -> None:
    (example,) = fenced_blocks(PAGE.read_text(), "python")
    exec(compile(example, str(PAGE), "exec"), {})
