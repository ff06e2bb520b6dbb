"""A launch's failure report ends with the doctor's line if a finding explains the failure, and has none otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import Ended, Job, clean_environ, python, write_script

pytestmark = [pytest.mark.root, pytest.mark.long]
FAILS = "import sys\nsys.exit(3)\n"
FILLS_ITS_DISK = """
    import sys
    try:
        with open("log/more", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError:
        sys.exit(3)
"""


def launched(folder: Path, script: str, mounts: str) -> Ended:
    path = write_script(script, folder)
    launch = python("-m", "fleet_train", "launch", "--started_port", str(free_ports(2)), str(path))
    with Job(folder) as job:
        command = ["unshare", "--mount", "sh", "-ec", f'{mounts}\nexec "$@"', "sh", *launch]
        job.start("launch", command, clean_environ())
        (ended,) = job.wait(timeout_seconds=60)
        assert job.orphans() == []
    return ended


def test_a_full_disk_is_named_at_the_end(tmp_path: Path) -> None:
    ended = launched(tmp_path, FILLS_ITS_DISK, "mkdir log; mount -t tmpfs -o size=8m tmpfs log")
    assert ended.exit_code == 3, ended.output
    last = ended.output.splitlines()[-1]
    assert last.startswith(f"fleet_train: doctor: FAIL  disk  node 0 (127.0.0.1): {tmp_path / 'log'} (logs): 0 B free")
    assert last.endswith("; more: python -m fleet_train doctor")


def test_a_script_that_fails_by_itself_gets_no_such_line(tmp_path: Path) -> None:
    ended = launched(tmp_path, FAILS, "true")
    assert ended.exit_code == 3, ended.output
    assert "doctor" not in ended.output
