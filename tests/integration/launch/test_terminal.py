"""Launchers whose output is read, or not read: neither failures nor signals are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launch.conftest import Bench, send

# Rank 0 says more than any pipe holds; rank 1 does what the argument says.
_SCRIPT = """
import os, pathlib, sys, time
if os.environ["PADDLE_TRAINER_ID"] == "0":
    for number in range(40_000):
        print("line", number, "x" * 100)
    pathlib.Path(sys.argv[2], "said").touch()
    time.sleep(0 if sys.argv[1] == "0" else 120)
else:
    while not pathlib.Path(sys.argv[2], "said").exists():
        time.sleep(0.01)
    time.sleep(1)
    if sys.argv[1] == "wait":
        time.sleep(120)
    sys.exit(int(sys.argv[1]))
"""
_TWO = ["--nproc_per_node=2"]


@pytest.fixture
def pipe(bench: Bench) -> Iterator[Path]:
    """A pipe that is open for reading, and never read."""
    path = bench.folder / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path
    os.close(reader)


def test_a_failure_is_noticed_while_no_one_reads_the_output(bench: Bench, pipe: Path) -> None:
    launcher = bench.start(_SCRIPT, "7", str(bench.folder), flags=_TWO, shell=f'"$@" >{pipe}')
    assert launcher.process.wait(timeout=120) == 7, launcher.output
    assert "rank 1" in next(line for line in launcher.output.splitlines() if "the job has failed" in line)
    assert "failed first  1" in launcher.output
    assert bench.job.leftovers() == []


def test_a_signal_is_handled_while_no_one_reads_the_output(bench: Bench, pipe: Path) -> None:
    launcher = bench.start(_SCRIPT, "wait", str(bench.folder), flags=_TWO, shell=f'exec "$@" >{pipe} 2>&1')
    bench.wait_for((bench.folder / "said").exists, "rank 0 has said all")
    send(launcher, signal.SIGTERM)
    assert launcher.process.wait(timeout=120) == 143
    assert bench.job.leftovers() == []


@pytest.mark.parametrize("code", [0, 7])
def test_a_reader_that_has_seen_enough_changes_no_exit_code(bench: Bench, code: int) -> None:
    launcher = bench.start(_SCRIPT, str(code), str(bench.folder), flags=_TWO, shell='"$@" | head -1')
    assert launcher.process.wait(timeout=120) == code, launcher.output
    assert launcher.output.count("line ") == 1
    assert ("failed first  1" in launcher.output) == (code == 7)


def test_a_slow_reader_gets_every_line(bench: Bench) -> None:
    launcher = bench.start(_SCRIPT, "0", str(bench.folder), flags=_TWO, shell='"$@" | (sleep 3; cat)')
    assert launcher.process.wait(timeout=120) == 0
    assert launcher.output.count("line ") == 40_000


def test_a_full_disk_behind_the_launchers_output_changes_no_exit_code(bench: Bench) -> None:
    launcher = bench.start(_SCRIPT, "0", str(bench.folder), flags=_TWO, shell='"$@" >/dev/full 2>&1')
    assert launcher.process.wait(timeout=120) == 0
