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
    run(tmp_path, example)


@pytest.mark.parametrize(("path", "test"), NAMED)
def test_named_code_exists(path: str, test: str) -> None:
    assert (ROOT / path).exists()
    assert not test or f"def {test}(" in (ROOT / path).read_text()


FORKED = """
import gc, os, signal, sys
import numpy as np
if sys.argv[1:]:
    import fleet_train.fleet
import paddle

gc.disable()  # the parent keeps its garbage until the child collects it
paddle.enable_static()
exe, main = paddle.static.Executor(), paddle.static.Program()
with paddle.static.program_guard(main):
    total = (2 * paddle.static.data("x", [None, 8])).sum()
for _ in range(2):
    exe.run(main, feed={"x": np.ones([4, 8], "float32")}, fetch_list=[total])
cycle = [exe]
cycle.append(cycle)
del exe, cycle
child = os.fork()
if not child:
    signal.alarm(60)  # its end, should it hang: nobody else would end it
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("arguments", "code"), [([], "-11"), (["with fleet_train"], "0")])
def test_forked_process_collects_no_executor_of_its_parent(arguments: list[str], code: str, tmp_path: Path) -> None:
    said = run(tmp_path, FORKED, *arguments)
    assert said.splitlines()[-1] == code


def run(folder: Path, script: str, *arguments: str) -> str:
    """What a script prints that ends with 0, in a process of its own: it changes Paddle's mode, flags and hooks."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=clean_environ(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
