"""The mutation tool: which changes it makes, and which of them tests notice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT, clean_environ, python
from tools import mutate

SOURCE = '''"""Says how many."""
def bounded(number, most):
    """No more than ``most``."""
    if not number or most < 1:
        return 0
    return min(number + 2, most)
'''


def changes(folder: Path, source: str = SOURCE) -> dict[str, str]:
    """By what is changed, the whole file with the change."""
    path = folder / "module.py"
    path.write_text(source)
    lines, found = source.splitlines(keepends=True), {}
    for mutant in mutate.mutants_of(path):
        first, last = mutant.lines
        found[mutant.what] = "".join([*lines[:first], mutant.text, *lines[last:]])
    return found


def test_each_place_is_changed_once_and_each_file_is_python(tmp_path: Path) -> None:
    found = changes(tmp_path)
    assert set(found) >= {
        "most < 1  ->  most <= 1",
        "1  ->  2",
        "not number  ->  not not number",
        "not number or most < 1  ->  not number and most < 1",
        "number + 2  ->  number - 2",
        "2  ->  3",
        "min  ->  max",
        "return 0  ->  return None",
        "return min(number + 2, most)  ->  return None",
        "if not number or most < 1:  ->  if False:",
        "if not number or most < 1:  ->  if True:",
    }
    for what, text in found.items():
        compile(text, what, "exec")
        assert text != SOURCE
    assert "return max(number + 2, most)" in found["min  ->  max"]


def test_a_call_is_left_out_and_texts_stay(tmp_path: Path) -> None:
    found = changes(tmp_path, 'def say(text):\n    print(text + "!")\n    return "done"\n')
    assert set(found) == {"left out: print(text + '!')", "return 'done'  ->  return None"}
    assert found["left out: print(text + '!')"].splitlines()[1] == "    pass"


def project_in(folder: Path) -> Path:
    """A checkout of one module and one test; returns the module."""
    for name in ("tests", "fleet_train", "tools"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "tools/mutate.py", folder / "tools")
    check = "from module import bounded\ndef test_it():\n    assert bounded(1, 9) == 3 and bounded(0, 9) == 0\n"
    (folder / "tests/test_module.py").write_text("import sys\nsys.path.insert(0, 'fleet_train')\n" + check)
    module = folder / "fleet_train/module.py"
    module.write_text(SOURCE)
    return module


def test_what_tests_notice_and_what_they_do_not(tmp_path: Path) -> None:
    """As people run it. In this process it would fork a child of everything other tests have left here."""
    module = project_in(tmp_path)
    command = python("tools/mutate.py", "fleet_train/module.py", "--tests", "tests/test_module.py")
    ended = subprocess.run(
        [*command, "--preload", "pytest"],
        env=clean_environ(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300.0,
    )
    assert ended.returncode == 0, ended.stderr
    *survived, counts = ended.stdout.splitlines()
    found = {mutant.what for mutant in mutate.mutants_of(module)}
    whats = {line.split(": ", 1)[1] for line in survived}
    assert whats < found
    assert "most < 1  ->  most <= 1" in whats
    assert not whats & {"2  ->  3", "number + 2  ->  number - 2", "min  ->  max"}
    assert counts.startswith(f"{len(found)} of {len(found)} changes tried")
    assert f"'survived': {len(survived)}" in counts
    assert module.read_text() == SOURCE


def test_a_change_is_in_the_copy_only_while_the_tests_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = project_in(tmp_path / "project")
    monkeypatch.setattr(mutate, "ROOT", tmp_path / "project")
    copied, tested = tmp_path / "copy/fleet_train/module.py", []
    copy = mutate.Copy(tmp_path / "copy", seconds=120.0)
    monkeypatch.setattr(copy, "run", lambda _: tested.append(copied.read_text()))
    mutants = {mutant.what: mutant for mutant in mutate.mutants_of(module)}
    copy.try_out(mutants["2  ->  3"], ["tests/test_module.py"])
    assert tested == [SOURCE.replace("number + 2", "number + 3")]
    assert copied.read_text() == SOURCE
