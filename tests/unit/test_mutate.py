"""The mutation tool: which changes it makes, and which of them tests notice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.processes import ROOT, clean_environ, python
from tools import mutate

SOURCE = '''"""Says how many."""
def bounded(number, most):
    """No more than ``most``."""
    print("said")
    if not number or most < 1:
        return 0
    return min(number + 2, most)
'''
CHANGES = {
    "most < 1  ->  most <= 1",
    "1  ->  2",
    "not number  ->  not not number",
    "not number or most < 1  ->  not number and most < 1",
    "number + 2  ->  number - 2",
    "2  ->  3",
    "min  ->  max",
    "left out: print('said')",
    "return 0  ->  return None",
    "return min(number + 2, most)  ->  return None",
    "if not number or most < 1:  ->  if False:",
    "if not number or most < 1:  ->  if True:",
}


def test_each_place_is_changed_once_and_what_no_test_notices_is_printed(tmp_path: Path) -> None:
    """As people run it. In this process it would fork a child of everything other tests have left here."""
    for name in ("tests", "fleet_train", "tools"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "tools/mutate.py", tmp_path / "tools")
    check = "from module import bounded\ndef test_it():\n    assert bounded(1, 9) == 3 and bounded(0, 9) == 0\n"
    (tmp_path / "tests/test_module.py").write_text("import sys\nsys.path.insert(0, 'fleet_train')\n" + check)
    module = tmp_path / "fleet_train/module.py"
    module.write_text(SOURCE)
    mutants, lines = list(mutate.mutants_of(module)), SOURCE.splitlines(keepends=True)
    assert {each.what for each in mutants} >= CHANGES
    for each in mutants:
        first, last = each.lines
        changed = "".join([*lines[:first], each.text, *lines[last:]])
        compile(changed, each.what, "exec")
        assert changed != SOURCE
    command = python("tools/mutate.py", "fleet_train/module.py", "--tests", "tests/test_module.py", "--preload=pytest")
    ended = subprocess.run(
        command, env=clean_environ(), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    *survived, counts = ended.stdout.splitlines()
    whats = {line.split(": ", 1)[1] for line in survived}
    assert {"most < 1  ->  most <= 1", "left out: print('said')"} <= whats < {each.what for each in mutants}
    assert not whats & {"2  ->  3", "number + 2  ->  number - 2", "min  ->  max"}
    assert counts.startswith(f"{len(mutants)} of {len(mutants)} changes tried")
    assert f"'survived': {len(survived)}" in counts
    assert module.read_text() == SOURCE
