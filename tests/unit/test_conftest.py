"""The rules of conftest.py catch what they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

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


LITTERING = """
from tests.conftest import ROOT

def test_tidy():
    (ROOT / "log").mkdir(exist_ok=True)
    (ROOT / "log/ignored.txt").write_text("")
    (ROOT / "earlier.txt").write_text("changed")

def test_littering():
    (ROOT / "saved").mkdir()
    (ROOT / "saved/left here.txt").write_text("")
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


def session_in(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The tests of LITTERING, with ``checkout`` in the folder as the checkout."""
    plugins = ("-p", "elsewhere", "-p", "tests.conftest")
    return subprocess.run(
        python("-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), *plugins, "test_litter.py", *flags),
        cwd=folder,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_new_file_in_the_checkout_fails_the_session(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "earlier.txt").write_text("")
    (checkout / ".gitignore").write_text("log/\n")
    (tmp_path / "test_litter.py").write_text(LITTERING)
    (tmp_path / "elsewhere.py").write_text(
        f"from tests.support import processes\nprocesses.ROOT = type(processes.ROOT)({str(checkout)!r})\n"
    )
    no_repository = session_in(tmp_path)
    assert no_repository.returncode == 0, no_repository.stdout + no_repository.stderr

    shutil.rmtree(checkout / "saved")
    subprocess.run(["git", "init", "--quiet", str(checkout)], check=True, timeout=60)
    tidy = session_in(tmp_path, "-k", "tidy")
    assert tidy.returncode == 0, tidy.stdout + tidy.stderr
    littering = session_in(tmp_path, "-n", "2")
    assert littering.returncode == 1, littering.stdout + littering.stderr
    assert "2 passed" in littering.stdout
    assert "tests write to tmp_path: ['saved/left here.txt']" in littering.stderr
