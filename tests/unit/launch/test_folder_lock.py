from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import fleet_train.files
from fleet_train.launch import logs
from tests.support.processes import clean_environ, python

_OTHER_JOB = """
import os, sys
from pathlib import Path
from fleet_train.launch.logs import take_log_dir
print(take_log_dir(Path(sys.argv[1])), os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def as_a_new_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    taken: dict[Path, tuple[Path, object]] = {}
    monkeypatch.setattr(logs, "_taken", taken)
    yield
    for _, held in taken.values():
        if held is not None:
            held.close()  # type: ignore[attr-defined]


def test_a_folder_in_use_by_another_job_is_left_to_it_until_that_ends(tmp_path: Path, messages: list[str]) -> None:
    other = subprocess.Popen(
        python("-c", _OTHER_JOB, str(tmp_path / "log")),
        env=clean_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    folder, pid = other.stdout.readline().split()
    try:
        assert folder == str(tmp_path / "log")
        for _ in range(2):  # as every attempt asks
            assert logs.take_log_dir(tmp_path / "log") == tmp_path / "log.2"
        assert len(messages) == 1
        assert messages[0].startswith(f"{tmp_path}/log is in use by another job (process {pid} of ")
        assert messages[0].endswith(f"); the logs of this one go to {tmp_path}/log.2 (--log_dir)")
        assert (tmp_path / "log.2").is_dir()
    finally:
        other.kill()
        other.communicate()
    logs._taken.clear()
    assert logs.take_log_dir(tmp_path / "log") == tmp_path / "log"
    assert len(messages) == 1


def test_a_file_system_without_locks_locks_no_one_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fleet_train.files.fcntl, "flock", has_none)
    assert logs.take_log_dir(tmp_path / "log") == tmp_path / "log"
    assert (tmp_path / "log").is_dir()


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"symbolic links: .*\.lock"):
        logs.take_log_dir(tmp_path / "log")
    assert (tmp_path / "precious").read_text() == "mine"
