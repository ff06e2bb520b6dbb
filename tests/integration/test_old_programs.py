"""docs/old-programs.md: the old lines fail on today's Paddle, the new ones run, and so does its example."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, clean_environ, python

PAGE = (ROOT / "docs" / "old-programs.md").read_text()

_TRY = """
import json, sys
import numpy as np
import paddle
from fleet_train import DistributedStrategy, compat

paddle.enable_static()


def attempt(line):
    main, startup = paddle.static.Program(), paddle.static.Program()
    dataset = type("Ones", (paddle.io.Dataset,), {
        "__len__": lambda self: 2, "__getitem__": lambda self, i: np.ones(4, "float32")})()
    feed = {"x": np.ones((2, 4), "float32"), "image": np.ones((2, 3, 8, 8), "float32"), "ids": np.ones(2, "int64")}
    exe = paddle.static.Executor(paddle.CPUPlace())
    try:
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            x = paddle.static.data("x", [None, 4])
            image = paddle.static.data("image", [None, 3, 8, 8])
            ids = paddle.static.data("ids", [None], "int64")
            loss = paddle.mean(paddle.static.nn.fc(x, 3))
            if line.startswith("exe.run"):
                exe.run(startup)
            made = eval(line)
            exe.run(startup)
            fetched = [made] if isinstance(made, paddle.pir.Value) else []
            exe.run(main, feed=feed, fetch_list=[loss, *fetched])
            if isinstance(made, paddle.io.DataLoader):
                exe.run(main, feed={**feed, **next(iter(made))[0]}, fetch_list=[loss])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


print(json.dumps([[attempt(line) for line in row] for row in json.load(open(sys.argv[1]))]))
"""


def rows() -> list[tuple[str, str]]:
    """(old line, new line) of the table; the new one is empty where it needs more than a line."""
    section = PAGE.split("## What Paddle 3.3 itself no longer has")[1].split("###")[0]
    found = re.findall(r"^\| `(.+?)` \| (?:`(.+?)`)?.* \|$", section, re.MULTILINE)
    assert len(found) == section.count("\n| ") - 2
    return found


def run(script: Path, *arguments: str) -> str:
    environ = clean_environ({"PYTHONPATH": str(ROOT)})
    command = python(str(script), *arguments)
    done = subprocess.run(
        command, cwd=script.parent, env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_old_line_fails_today_and_each_new_one_runs(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(rows()))
    (tmp_path / "attempt.py").write_text(_TRY)
    outcomes = json.loads(run(tmp_path / "attempt.py", "rows.json").splitlines()[-1])
    runs_still = [old for (old, _), (problem, _) in zip(rows(), outcomes, strict=True) if problem is None]
    assert runs_still == []
    assert [problem for (_, new), (_, problem) in zip(rows(), outcomes, strict=True) if new and problem] == []


@pytest.mark.long
def test_example_of_a_program_for_testing_tests_twice_alike(tmp_path: Path) -> None:
    example = next(block for block in fenced_blocks(PAGE, "python") if "unique_name" in block)
    (tmp_path / "example.py").write_text(example)
    assert run(tmp_path / "example.py").splitlines()[-1] == "tested twice: True"


@pytest.mark.long
def test_example_of_a_dataset_learns(tmp_path: Path) -> None:
    example = next(block for block in fenced_blocks(PAGE, "python") if "QueueDataset" in block)
    (tmp_path / "example.py").write_text(example)
    losses = [float(value) for value in re.findall(r"batch [48], loss: (\S+)", run(tmp_path / "example.py"))]
    assert len(losses) == 40
    # The start values are random, so the first loss may be small, too.
    assert losses[-1] < min(0.05, losses[0] / 100.0)


def test_number_of_snippets_is_the_recorded_one() -> None:
    recorded = json.loads((ROOT / "tests" / "unit" / "port" / "numbers_1_8.json").read_text())
    assert f"{len(recorded)} snippets were run" in PAGE
