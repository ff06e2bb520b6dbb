"""If no end record can be written to the log folder, the ranks' exit codes decide."""

from __future__ import annotations

import os

import pytest

from tests.integration.launch.conftest import Bench

pytestmark = pytest.mark.long

# The end records are written under another name first. As on a full disk, no file can be made where there is a folder.
_SCRIPT = """
import os, sys
for rank in range(2):
    record = f"{os.environ['PADDLE_LOG_DIR']}/workerend.{rank}.json.tmp"
    os.makedirs(record, exist_ok=True)
sys.exit(int(sys.argv[1]) if os.environ["PADDLE_TRAINER_ID"] == "1" else 0)
"""
_FLAGS = ["--nproc_per_node=2", "--max_restarts=1"]


def fill(bench: Bench) -> None:
    """From the beginning: not even that the ranks have started can be written down."""
    for rank in range(2):
        (bench.folder / "node0" / "log" / f"workerend.{rank}.json.tmp").mkdir(parents=True)


@pytest.mark.parametrize("from_the_beginning", [True, False])
def test_a_finished_job_is_finished(bench: Bench, from_the_beginning: bool) -> None:
    if from_the_beginning:
        fill(bench)
    bench.start(_SCRIPT, "0", flags=_FLAGS)
    (ended,) = bench.ended()
    assert ended.exit_code == 0, ended.output
    said = [line for line in ended.output.splitlines() if os.strerror(21) in line]
    assert len(said) == 1, ended.output
    assert said[0].startswith("fleet_train: ")
    assert said[0].endswith(f"cannot be written: {os.strerror(21)}; the job continues, logs are incomplete")
    assert "restart" not in ended.output


def test_a_failure_has_its_own_exit_code(bench: Bench) -> None:
    fill(bench)
    bench.start(_SCRIPT, "7", flags=["--nproc_per_node=2"])
    (ended,) = bench.ended()
    assert ended.exit_code == 7, ended.output
    assert "rank 1" in next(line for line in ended.output.splitlines() if "the job has failed" in line)


def test_a_folder_that_cannot_be_written_from_the_beginning_is_refused(bench: Bench) -> None:
    log = bench.folder / "node0" / "log"
    (log / "workerlog.0").mkdir(parents=True)
    bench.start("print('a rank ran')")
    (ended,) = bench.ended()
    assert ended.exit_code == 5, ended.output
    assert ended.output.splitlines()[-1] == (
        f"fleet_train: --log_dir={log}: {log}/workerlog.0 cannot be written: {os.strerror(21)}; make "
        "room, or choose another folder"
    )
