"""The wrapper by itself, as the stock launcher would start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleet_train.launch import worker_main
from fleet_train.launch.worker_group import Inbox


def start(folder: Path, code: str, *arguments: str, token: str = "1-ab") -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text(code)
    environ = {
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_CURRENT_ENDPOINT": "127.0.0.3:6171",
        "PADDLE_LOG_DIR": "/somewhere/else",
        "PADDLE_BACKUP_ENV_PATH": "/dev/null",
    }
    program = json.dumps([str(folder / "script.py"), *arguments])
    # The token's pid is that of our launcher; 1 can be no child's parent here without being gone.
    return subprocess.Popen([sys.executable, worker_main.__file__, str(folder / "logs"), token, program], env=environ)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "logs" / "workerend.1.json").read_text())
    return found


def output(folder: Path) -> str:
    return (folder / "logs" / "workerlog.1").read_text()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_planted_links_in_the_log_folder_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "logs").mkdir()
    for name in ("workerlog.1", "workerend.1.json", "workerend.1.json.tmp"):
        (tmp_path / "logs" / name).symlink_to(precious)
    assert start(tmp_path, "print('fine')").wait(timeout=120) == 0
    assert precious.read_text() == "mine"
    assert output(tmp_path) == "fine\n"
    assert record(tmp_path)["exit_code"] == 0


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "signal_number"),
    [
        ("print('fine')", 0, 0, None),
        ("raise SystemExit(7)", 7, 7, None),
        ("raise ValueError('bad')", 1, 1, None),
        ("import os; os.kill(os.getpid(), 9)", -9, None, 9),
        ("import os; os.abort()", -6, None, 6),
    ],
)
def test_the_end_is_passed_on_and_written_down(
    tmp_path: Path, code: str, status: int, exit_code: int | None, signal_number: int | None
) -> None:
    assert start(tmp_path, code).wait(timeout=120) == status
    written = record(tmp_path)
    assert (written["rank"], written["endpoint"], written["token"]) == (3, "127.0.0.3:6171", "1-ab")
    assert (written["exit_code"], written["signal"], written["asked_to_stop"]) == (exit_code, signal_number, None)
    assert (
        0 <= written["wall_seconds"] == pytest.approx(written["ended_monotonic"] - written["began_monotonic"], abs=0.01)
    )


def test_output_arguments_and_environment_of_the_script(tmp_path: Path) -> None:
    code = "import os, sys\nprint(sys.argv[1:], os.environ['PADDLE_LOG_DIR'], 'PADDLE_BACKUP_ENV_PATH' in os.environ)\n"
    assert start(tmp_path, code + "print(sys.stdin.read() == '', file=sys.stderr)", "--lr=1", "--", "-m").wait(120) == 0
    assert output(tmp_path) == f"['--lr=1', '--', '-m'] {tmp_path / 'logs'} False\nTrue\n"


def test_a_signal_is_forwarded_once_and_the_script_may_save_its_state(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\ngot = []\n"
        "def stop(number, frame):\n    got.append(number); time.sleep(0.5); print('saved', got); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, stop)\npathlib.Path({str(tmp_path / 'ready')!r}).touch()\ntime.sleep(60)\n"
    )
    process = start(tmp_path, code)
    wait_for(tmp_path / "ready")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.wait(timeout=120) == 0
    assert output(tmp_path) == "saved [15]\n"
    assert record(tmp_path)["asked_to_stop"] == signal.SIGTERM


def test_a_script_that_ignores_the_signal_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"path = pathlib.Path({str(tmp_path / 'ready')!r})\npath.with_name('tmp').write_text(str(child.pid))\n"
        "path.with_name('tmp').rename(path)\ntime.sleep(60)\n"
    )
    process = start(tmp_path, code)
    wait_for(tmp_path / "ready")
    grandchild = int((tmp_path / "ready").read_text())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == -signal.SIGKILL
    assert worker_main.GRACE_SECONDS - 0.5 < time.monotonic() - began < worker_main.GRACE_SECONDS + 60
    assert (record(tmp_path)["signal"], record(tmp_path)["asked_to_stop"]) == (9, 15)
    assert not Path(f"/proc/{grandchild}").exists() or "Z" in Path(f"/proc/{grandchild}/stat").read_text().split()[2]


def test_the_script_dies_with_its_wrapper(tmp_path: Path) -> None:
    process = start(
        tmp_path, f"import pathlib, time\npathlib.Path({str(tmp_path / 'ready')!r}).touch()\ntime.sleep(60)\n"
    )
    wait_for(tmp_path / "ready")
    wait_for(tmp_path / "logs" / "workerend.1.json")
    script = record(tmp_path)["pid"]
    process.kill()
    process.wait(timeout=120)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{script}").exists() and "Z" not in Path(f"/proc/{script}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the script lives on without its wrapper"
        time.sleep(0.02)
    assert os.path.exists(tmp_path / "logs" / "workerlog.1")


def test_what_cannot_be_written_to_a_disk_is_sent_to_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "logs" / "workerlog.1").mkdir(parents=True)  # no log can be opened there
    (tmp_path / "logs" / "workerend.1.json.tmp").mkdir()
    said: list[str] = []
    token = f"1-{os.getpid()}"
    inbox = Inbox(token, said.append)
    try:
        assert start(tmp_path, "print('lost'); raise SystemExit(7)", token=token).wait(timeout=120) == 7
        told = inbox.look()[1]
    finally:
        inbox.close()
    assert (told["rank"], told["exit_code"], told["signal"], told["token"]) == (3, 7, None, token)
    assert said == [
        f"{tmp_path}/logs/workerlog.1 cannot be written: Is a directory; the job continues, logs are incomplete"
    ]


def test_a_wrapper_whose_launcher_died_ends_with_its_scripts_code(tmp_path: Path) -> None:
    (tmp_path / "logs" / "workerend.1.json.tmp").mkdir(parents=True)
    assert start(tmp_path, "raise SystemExit(7)").wait(timeout=120) == 7
