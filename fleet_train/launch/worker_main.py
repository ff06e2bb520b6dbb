"""The wrapper that the stock launcher runs as every rank: runs the user's script as its child, records how it ended.

    worker_main.py LOG_DIR TOKEN '["train.py", "--epochs", "3"]'

The stock launcher does not record when or why a rank ended, and a rank survives when its launcher is killed.
Standard library only, and no import of fleet_train: this runs once per rank before the user's first line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, BinaryIO

# How long a rank that has to end may take. A graceful stop has no bound here: its sender bounds it.
GRACE_SECONDS = 3.0
GRACEFUL_STOP = signal.SIGUSR1
# A signal to the whole group reaches the child and us in any order.
_SIGNAL_RACE_SECONDS = 0.05
_TELL_SECONDS = 2.0
PRIVATE_PREFIX = "fleet_train-launch-"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def record_name(local_rank: int) -> str:
    return f"workerend.{local_rank}.json"


def log_name(local_rank: int) -> str:
    return f"workerlog.{local_rank}"


def inbox_address(token: str) -> str:
    """Where our launcher receives records that could not be written: an abstract Linux socket."""
    return f"\0fleet_train-{token}"


def launcher_pid(token: str) -> int:
    """A token is ``<pid of our launcher>-<random>``: it distinguishes records of different jobs."""
    return int(token.split("-")[0])


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for this signal when the parent's thread that forked us ends, however it ends (Linux only)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def dying_with_us() -> Callable[[], None]:
    """For a child's ``preexec_fn``: it is killed when this process ends, even if that has already happened."""
    us = os.getpid()

    def in_child() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != us:
            os._exit(1)

    return in_child


class RankProcess:
    """The user's script as a child in a process group of its own."""

    def __init__(self, command: list[str], log_path: str, environ: dict[str, str], launcher: int = 0) -> None:
        self.command = command
        self.launcher = launcher  # the process id of ours
        self.log_path = log_path
        self.environ = environ
        self.asked_to_stop = 0  # the first signal sent to the child
        self.trouble = ""  # why there is no log
        self._must_end = False
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(GRACEFUL_STOP, self._on_graceful_stop)
        signal.signal(signal.SIGALRM, self._on_grace_over)
        tie_to_us = dying_with_us()

        def in_child() -> None:
            os.setpgid(0, 0)
            tie_to_us()

        with self._open_log() as log:
            self.child = subprocess.Popen(
                self.command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=in_child,
            )
        if self.asked_to_stop:  # arrived while the child was being created
            self.child.send_signal(self.asked_to_stop)

    def _open_log(self) -> BinaryIO:
        try:
            os.makedirs(os.path.dirname(self.log_path), exist_ok=True)
            return open_new(self.log_path)
        except OSError as error:
            self.trouble = f"{self.log_path} cannot be written: {error.strerror}"
            return open(os.devnull, "wb")

    def wait(self) -> int:
        """The child's exit status as subprocess gives it (negative: the signal); no process of a failed rank stays."""
        assert self.child is not None
        status = self.child.wait()
        signal.alarm(0)
        if status and not self.asked_to_stop:
            time.sleep(_SIGNAL_RACE_SECONDS)
        if status or self.asked_to_stop:
            self._signal_group(signal.SIGKILL)
        return status

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        # The kernel sends it when the stock launcher was killed, and our launcher, which adopts us then, takes that for
        # a failure: a script that saves its state and stops would turn it into a wanted end.
        if os.getppid() == self.launcher and self.child is not None:
            self.asked_to_stop = self.asked_to_stop or number
            self._signal_group(signal.SIGKILL)
            return
        # Only the first signal is forwarded: the stock launcher repeats it, and a script may be saving its state.
        if not self._must_end:
            self._must_end = True
            self._forward(number)
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def _on_graceful_stop(self, _: int, __: FrameType | None) -> None:
        if not self.asked_to_stop:
            self._forward(signal.SIGTERM)

    def _forward(self, number: int) -> None:
        self.asked_to_stop = self.asked_to_stop or number
        if self.child is not None:
            self.child.send_signal(number)

    def _on_grace_over(self, _: int, __: FrameType | None) -> None:
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        assert self.child is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, number)


def open_new(path: str) -> BinaryIO:
    """A new file of this name, as by `fleet_train.files.open_new`: a link with that name is not followed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb")


def write_record(path: str, record: dict[str, Any]) -> None:
    temporary = f"{path}.tmp"
    with open_new(temporary) as file:
        file.write(json.dumps(record).encode())
    os.replace(temporary, path)


def write_down(path: str, record: dict[str, Any]) -> None:
    """Write to the file; if the disk prevents that, or the log (``trouble``), send it to the launcher directly."""
    trouble = record["trouble"]
    try:
        write_record(path, record)
    except OSError as error:
        trouble = trouble or f"{path} cannot be written: {error.strerror}"
    if trouble:
        tell_launcher(record | {"trouble": trouble})


def tell_launcher(record: dict[str, Any]) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(_TELL_SECONDS)  # it may be busy, or gone
        sender.sendto(json.dumps(record).encode(), inbox_address(record["token"]))


def remove_abandoned(private: str) -> None:
    """If our launcher was killed, remove its private folder (links to /dev/null, empty logs)."""
    if not os.path.basename(private).startswith(PRIVATE_PREFIX) or not os.path.isdir(private):
        return
    for entry in list(os.scandir(private)):
        with contextlib.suppress(OSError):  # the wrappers of all ranks may do this at once
            os.unlink(entry.path)
    with contextlib.suppress(OSError):
        os.rmdir(private)


def end_as(status: int) -> None:
    """Exit as the child did; a signal is repeated on ourselves, without a second core file."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def main(log_dir: str, token: str, program: str) -> None:
    die_with_parent(signal.SIGTERM)
    parent = os.getppid()
    if parent in (1, launcher_pid(token)):
        return  # the stock launcher died before the line above
    local_rank = int(os.environ["PADDLE_LOCAL_RANK"])
    private = os.environ.get("PADDLE_LOG_DIR", "")
    environ = dict(os.environ, PADDLE_LOG_DIR=log_dir)
    environ.pop("PADDLE_BACKUP_ENV_PATH", None)  # it is a link to /dev/null, see paddle_launch.py
    path = os.path.join(log_dir, record_name(local_rank))
    record: dict[str, Any] = {
        "token": token,
        "rank": int(os.environ["PADDLE_TRAINER_ID"]),
        "local_rank": local_rank,
        "endpoint": os.environ["PADDLE_CURRENT_ENDPOINT"],
        "wrapper_pid": os.getpid(),
    }
    command = [sys.executable, "-u", *json.loads(program)]
    rank = RankProcess(command, os.path.join(log_dir, log_name(local_rank)), environ, launcher_pid(token))
    began = time.monotonic()
    rank.start()
    assert rank.child is not None
    record |= {"pid": rank.child.pid, "began_monotonic": began, "trouble": rank.trouble}
    write_down(path, record)
    status = rank.wait()
    ended = time.monotonic()
    record |= {
        "ended_monotonic": ended,
        "wall_seconds": round(ended - began, 3),
        "exit_code": status if status >= 0 else None,
        "signal": -status if status < 0 else None,
        "asked_to_stop": rank.asked_to_stop or None,
    }
    write_down(path, record)
    if os.getppid() != parent:
        remove_abandoned(private)
    end_as(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
