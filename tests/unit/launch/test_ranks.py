"""Ranks as real processes: their output, end records and signals; the folder of their logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fleet_train.files
from fleet_train import timeouts
from fleet_train.launch import logs, processes
from fleet_train.launch.logs import LogFolder
from fleet_train.launch.node import Node
from fleet_train.launch.processes import Process, StopRequested, stopping_signals, why_not_started
from fleet_train.launch.supervise import RankProcess, Ranks
from tests.support.processes import clean_environ, python, until

NODE = Node(("127.0.0.2", "127.0.0.3"), 1, 6170, 1, None, None)
Starter = Callable[..., Ranks]
NAMES = ("workerlog.0", "workerend.0.json", "workerend.0.json.tmp")


def ranks_of(folder: Path, command: list[str]) -> Ranks:
    """The only rank of node 1."""
    logs = LogFolder(NODE, folder)
    return Ranks(NODE, lambda local: logs.start_rank(local, command, clean_environ()))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Starter]:
    """Starts the only rank of node 1; ``said`` of the result has what was reported."""
    every: list[Ranks] = []
    (tmp_path / "logs").mkdir()

    def start(code: str, *arguments: str) -> Ranks:
        (tmp_path / "script.py").write_text(code)
        ranks = ranks_of(tmp_path / "logs", python("-u", str(tmp_path / "script.py"), *arguments))
        every.append(ranks)
        ranks.start()
        return ranks

    yield start
    for ranks in every:
        ranks.close()


def ended(ranks: Ranks) -> Any:
    until(lambda: ranks.running() == 0)
    return ranks.ends(0.0)[0]


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "logs" / "workerend.0.json").read_text())
    return found


def is_gone(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


def test_output_goes_into_the_log_folder_and_not_through_links_that_were_planted_there(
    tmp_path: Path, started: Starter
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in NAMES:
        (tmp_path / "logs" / name).symlink_to(precious)
    code = "import sys\nprint(sys.argv[1:])\nprint(sys.stdin.read() == '', file=sys.stderr)\n"
    ranks = started(code, "--lr=1", "--", "-m")
    assert ended(ranks).succeeded
    ranks.close()
    assert precious.read_text() == "mine"
    assert (tmp_path / "logs" / "workerlog.0").read_text() == "['--lr=1', '--', '-m']\nTrue\n"
    assert record(tmp_path)["exit_code"] == 0


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [
        ("raise SystemExit(7)", 7, None),
        ("import os; os.abort()", None, 6),
    ],
)
def test_an_end_is_placed_in_the_job_and_written_down(
    tmp_path: Path, started: Starter, code: str, exit_code: int | None, number: int | None
) -> None:
    before = time.monotonic()
    ranks = started(code)
    end = ended(ranks)
    assert (end.rank, end.endpoint, end.node_index, end.asked_to_stop) == (1, "127.0.0.3:6170", 1, False)
    assert (end.exit_code, end.signal_number, end.log_file) == (exit_code, number, f"{tmp_path}/logs/workerlog.0")
    assert before < end.seconds <= time.monotonic()
    ranks.close()
    written = record(tmp_path)
    assert (written["rank"], written["local_rank"], written["endpoint"]) == (1, 0, "127.0.0.3:6170")
    assert (written["exit_code"], written["signal"], written["asked_to_stop"]) == (exit_code, number, None)
    assert round(written["ended_monotonic"], 3) == end.seconds
    assert written["wall_seconds"] == pytest.approx(written["ended_monotonic"] - written["began_monotonic"], abs=0.01)


def test_a_rank_is_written_down_while_it_runs(tmp_path: Path, started: Starter) -> None:
    ranks = started("import time; time.sleep(60)")
    assert record(tmp_path).keys() == {"rank", "local_rank", "endpoint", "pid", "began_monotonic"}
    assert not is_gone(record(tmp_path)["pid"])
    ranks.stop()
    assert ended(ranks).signal_number == signal.SIGTERM


_SAVING = """
import os, pathlib, signal, sys, time
ready, asked, go = map(pathlib.Path, sys.argv[1:])
got = []
def stop(number, frame):
    got.append(number)
    asked.touch()
    while not go.exists():
        time.sleep(0.01)
    print('saved', got)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
ready.touch()
time.sleep(60)
"""


def test_a_request_to_stop_comes_once_and_the_script_may_save_its_state(tmp_path: Path, started: Starter) -> None:
    here = [tmp_path / name for name in ("ready", "asked", "go")]
    ranks = started(_SAVING, *map(str, here))
    until(here[0].exists)
    ranks.ask_to_stop()
    until(here[1].exists)
    for _ in range(2):
        ranks.ask_to_stop()
    here[2].touch()
    end = ended(ranks)
    assert (end.exit_code, end.asked_to_stop) == (0, True)
    assert (tmp_path / "logs" / "workerlog.0").read_text() == "saved [15]\n"


_STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
path = pathlib.Path(sys.argv[1])
path.with_name('tmp').write_text(str(child.pid))
path.with_name('tmp').rename(path)
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


def test_a_script_that_ignores_the_signal_is_killed_with_its_children(tmp_path: Path, started: Starter) -> None:
    ranks = started(_STUBBORN, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists)
    began = time.monotonic()
    ranks.stop()
    end = ended(ranks)
    assert (end.signal_number, end.asked_to_stop) == (signal.SIGKILL, True)
    assert timeouts.STOP_GRACE_SECONDS - 0.5 < time.monotonic() - began < timeouts.STOP_GRACE_SECONDS + 60
    until(lambda: is_gone(int((tmp_path / "ready").read_text())))


@pytest.mark.parametrize(("code", "stays"), [("0", True), ("3", False)])
def test_what_a_rank_has_started_stays_only_if_it_has_succeeded(
    tmp_path: Path, started: Starter, code: str, stays: bool
) -> None:
    ranks = started(_STUBBORN, str(tmp_path / "ready"), code)
    assert ended(ranks).exit_code == int(code)
    ranks.close()
    child = int((tmp_path / "ready").read_text())
    try:
        if stays:
            assert not is_gone(child)
        else:
            until(lambda: is_gone(child))
    finally:
        if stays:
            os.kill(child, signal.SIGKILL)


_LAUNCHER = """
import sys
from pathlib import Path
from fleet_train.launch.logs import LogFolder
from fleet_train.launch.node import Node
from fleet_train.launch.processes import adopt_orphans, kill_descendants
from fleet_train.launch.supervise import Ranks
folder = Path(sys.argv[1])
node = Node(("127.0.0.1",), 0, 6170, 1, None, None)
logs, command = LogFolder(node, folder), [sys.executable, str(folder / "script.py"), str(folder / "ready")]
ranks = Ranks(node, lambda local: logs.start_rank(local, command, {}))
adopt_orphans()
ranks.start()
ranks.started[0].wait()
ranks.stop()
kill_descendants()
"""


_DAEMON = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        path = pathlib.Path(sys.argv[1])
        path.with_name("tmp").write_text(str(os.getpid()))
        path.with_name("tmp").rename(path)
        time.sleep(60)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_what_a_rank_has_started_in_a_session_of_its_own_ends_when_the_ranks_are_stopped(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_DAEMON)
    subprocess.run(python("-c", _LAUNCHER, str(tmp_path)), env=clean_environ(), check=True, timeout=60)
    assert is_gone(int((tmp_path / "ready").read_text()))


def test_files_of_an_earlier_job_are_removed_other_files_stay(tmp_path: Path) -> None:
    for name in ("workerlog.0", "workerend.0.json", "workerlog.7", "notes.txt"):
        (tmp_path / name).touch()
    LogFolder(NODE, tmp_path).prepare()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "workerlog.7"]


def test_a_command_that_cannot_be_started_is_an_error_of_one_line(tmp_path: Path) -> None:
    fits, command = (python("-c", "", "x" * size) for size in (32 * 4096 - 1, 32 * 4096))
    ranks = ranks_of(tmp_path, fits)
    ranks.start()
    assert ended(ranks).succeeded
    ranks.close()
    ranks = ranks_of(tmp_path, command)
    with pytest.raises(OSError, match="Argument list too long") as failed:
        ranks.start()
    ranks.close()
    assert str(why_not_started(failed.value, command, {"NAME": "ab"})).startswith(
        "the ranks cannot be started: the environment has 8 bytes and the command"
    )
    missing = FileNotFoundError(2, "No such file or directory", "/no/python")
    assert str(why_not_started(missing, ["/no/python"], {})) == (
        "the ranks cannot be started: No such file or directory (/no/python)"
    )


def test_a_process_that_hangs_in_the_kernel_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STOP_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(timeouts, "KILL_SECONDS", 0.05)
    process = Process(python("-c", "import time; time.sleep(60)"), clean_environ(), subprocess.DEVNULL)
    kill_group = process.kill_group
    process.kill_group = lambda: None  # type: ignore[method-assign]
    process.ask_to_stop = lambda *_: None  # type: ignore[method-assign]
    try:
        processes.stop([process])
        assert process.status == -signal.SIGKILL
    finally:
        kill_group()


def test_the_end_of_a_rank_that_ends_at_once_is_the_last_record() -> None:
    written: list[dict[str, Any]] = []
    rank = RankProcess(python("-c", ""), clean_environ(), subprocess.DEVNULL, "", written.append)
    rank.wait(60.0)
    rank.await_record(60.0)
    rank.write_record()
    assert [record["exit_code"] for record in written] == [0, 0]


_WITH_SIGCHLD_IGNORED = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from fleet_train.launch.processes import Process, adopt_orphans
adopt_orphans()
print(Process([sys.executable, "-c", "raise SystemExit(3)"], {}, -3).wait())
"""


def test_a_launcher_that_was_started_with_sigchld_ignored_knows_exit_codes() -> None:
    done = subprocess.run(
        python("-c", _WITH_SIGCHLD_IGNORED), env=clean_environ(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"


def code_of(number: int, *, has_watched: bool = False) -> int:
    with pytest.raises(StopRequested) as raised, stopping_signals() as stopping:  # noqa: PT012
        if has_watched:
            with stopping.gracefully():
                pass
        os.kill(os.getpid(), number)
        signal.pause()
    return raised.value.exit_code


def test_a_graceful_signal_ends_with_12_once_ranks_have_run() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        assert code_of(number) == 128 + number
        assert code_of(number, has_watched=True) == 12
    assert code_of(signal.SIGINT, has_watched=True) == 130, "Ctrl-C is none"


@pytest.mark.parametrize("ranks_run", [True, False])  # or: it comes between two attempts
def test_a_second_signal_is_no_stop_in_good_order(ranks_run: bool) -> None:
    with pytest.raises(StopRequested) as raised, stopping_signals() as stopping:  # noqa: PT012
        with stopping.gracefully():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopping.asked == signal.SIGTERM
            if ranks_run:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert raised.value.exit_code == 143


_OTHER_JOB = """
import os, sys
from pathlib import Path
from fleet_train.launch.logs import take_log_dir
print(take_log_dir(Path(sys.argv[1])), os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def as_a_new_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    taken: dict[Path, tuple[Path, Any]] = {}
    monkeypatch.setattr(logs, "_taken", taken)
    yield
    for _, held in taken.values():
        if held is not None:
            held.close()


@pytest.mark.usefixtures("as_a_new_launcher")
def test_a_folder_in_use_by_another_job_is_left_to_it_until_that_ends(tmp_path: Path, messages: list[str]) -> None:
    command, pipes = python("-c", _OTHER_JOB, str(tmp_path / "log")), {"stdin": subprocess.PIPE, "text": True}
    other = subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, **pipes)  # type: ignore[call-overload]
    folder, pid = other.stdout.readline().split()
    try:
        assert folder == str(tmp_path / "log")
        for _ in range(2):  # as every attempt asks
            assert logs.take_log_dir(tmp_path / "log") == tmp_path / "log.2"
        assert len(messages) == 1
        assert messages[0].startswith(f"{tmp_path}/log is in use by another job (process {pid} of ")
        assert messages[0].endswith(f"); the logs of this one go to {tmp_path}/log.2")
        assert (tmp_path / "log.2").is_dir()
    finally:
        other.kill()
        other.communicate()
    logs._taken.clear()
    assert logs.take_log_dir(tmp_path / "log") == tmp_path / "log"
    assert len(messages) == 1


@pytest.mark.usefixtures("as_a_new_launcher")
def test_a_file_system_without_locks_locks_no_one_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fleet_train.files.fcntl, "flock", has_none)
    assert logs.take_log_dir(tmp_path / "log") == tmp_path / "log"
    assert (tmp_path / "log").is_dir()


@pytest.mark.usefixtures("as_a_new_launcher")
def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"symbolic links: .*\.lock"):
        logs.take_log_dir(tmp_path / "log")
    assert (tmp_path / "precious").read_text() == "mine"
