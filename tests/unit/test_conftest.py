"""The rules of conftest.py catch what they are for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.processes import ROOT, clean_environ, python

LEAKING = """
import os, subprocess, threading, time
import pytest
from tests import conftest

conftest._GRACE_SECONDS = 0.5  # nothing here is about to end by itself

def test_variable():
    os.environ["LEAKED"] = "1"

def test_variable_of_the_test_before_is_gone():
    assert "LEAKED" not in os.environ

def test_thread():
    threading.Thread(target=time.sleep, args=(8,), daemon=True, name="leaked").start()

def test_process():
    subprocess.Popen(["sleep", "30"])

def test_file():
    open("leaked.txt", "w").close()

def test_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDY", "1")
    monkeypatch.chdir(tmp_path)
    open("mine.txt", "w").close()

@pytest.mark.root
def test_root():
    pytest.skip("cannot")
"""


def outcomes(folder: Path, ci: str, *flags: str) -> dict[str, set[str]]:
    """test name -> its outcomes (a test can pass and then fail in its teardown)."""
    (folder / "test_leaks.py").write_text(LEAKING)
    done = subprocess.run(
        python(
            "-m", "pytest", "-v", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "test_leaks.py", *flags
        ),
        cwd=folder,
        env=clean_environ({"CI": ci}),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    found: dict[str, set[str]] = {}
    for name, outcome in re.findall(r"::test_(\w+) (PASSED|FAILED|ERROR|SKIPPED)", done.stdout):
        found.setdefault(name, set()).add(outcome)
    assert found, done.stdout + done.stderr
    return found


def test_each_kind_of_leak_is_an_error(tmp_path: Path) -> None:
    found = outcomes(tmp_path, ci="true")
    for leak in ("variable", "thread", "process", "file"):
        assert "ERROR" in found[leak], leak
    assert found["clean"] == {"PASSED"}
    assert found["variable_of_the_test_before_is_gone"] == {"PASSED"}
    assert "FAILED" in found["root"], "a root test that is skipped in CI has not been run"


def test_root_test_may_be_skipped_outside_ci(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "", "-k", "test_root")["root"] == {"SKIPPED"}
