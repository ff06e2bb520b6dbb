"""Starting the stock launcher and stopping all processes that it started, with features of the Linux kernel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from fleet_train.errors import ClusterError
from fleet_train.launch.workers import worker_main

LONGEST_WORD_BYTES = 32 * os.sysconf("SC_PAGE_SIZE")
"""Linux: of one word of a command line, with the zero byte at its end (MAX_ARG_STRLEN)."""

_PR_SET_CHILD_SUBREAPER = 36
# The wrappers need worker_main.GRACE_SECONDS for a rank that ignores SIGTERM; the rest is for writing records and exit.
_STOP_SECONDS = worker_main.GRACE_SECONDS + 2.0
_KILL_SECONDS = 3.0
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Processes whose parent dies become our children instead of init's, so that we can still find and stop them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_stock_launcher(command: list[str], environ: Mapping[str, str], private: Path) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, so that Ctrl-C reaches only us; it dies when we do, even by SIGKILL.

    Its own output goes to ``stock.log`` in the private folder. Raises ClusterError if it cannot be started.
    """
    try:
        with open(private / "stock.log", "wb") as log:
            return subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=worker_main.dying_with_us(),
            )
    except OSError as error:
        why = f"{error.strerror} ({error.filename})" if error.errno != errno.E2BIG else _too_much(command, environ)
        raise ClusterError(f"the ranks cannot be started: {why}") from error


def _too_much(command: list[str], environ: Mapping[str, str]) -> str:
    words = sum(len(os.fsencode(word)) + 1 for word in command)
    variables = sum(len(os.fsencode(f"{name}={value}")) + 1 for name, value in environ.items())
    whole = os.sysconf("SC_ARG_MAX")
    return (
        f"the environment has {variables} bytes and the command {words}, and this system takes {whole} together (a "
        f"quarter of the stack's limit, ulimit -s) and {LONGEST_WORD_BYTES} in one word; make the environment smaller, "
        "or write the arguments into a file that the script reads"
    )


def freeze(stock: subprocess.Popen[bytes]) -> None:
    """Stop (SIGSTOP) the stock launcher once its ranks run: it would kill ranks that save their state.

    It is no longer needed: we monitor the ranks ourselves, and SIGKILL ends a stopped process too.
    """
    _signal(stock.pid, signal.SIGSTOP)


def ask_to_stop(wrapper_pids: Iterable[int]) -> None:
    """Send SIGTERM to the ranks, without a bound on how long they take to end."""
    for pid in wrapper_pids:
        _signal(pid, worker_main.GRACEFUL_STOP)


def end_everything(stock: subprocess.Popen[bytes], wrapper_pids: Iterable[int]) -> None:
    """Stop all ranks and the stock launcher: by SIGTERM through the wrappers, then by SIGKILL. Takes at most about 8 s.

    The stock launcher itself gets no SIGTERM: it would wait up to 30 s for its containers.
    """
    waiting = set(wrapper_pids)
    for pid in waiting:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while waiting and time.monotonic() < deadline:
        waiting = {pid for pid in waiting if runs(pid)}
        time.sleep(0.02)
    kill_now(stock)


def end_idle_launcher(stock: subprocess.Popen[bytes]) -> None:
    """Stop the stock launcher after all its ranks have succeeded; it would notice within a second or two.

    Processes that a script left running on purpose (a VisualDL server) continue.
    """
    stock.kill()
    stock.wait()


def kill_now(stock: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the stock launcher and for every descendant of ours, until there is none."""
    stock.kill()
    stock.wait()
    deadline = time.monotonic() + _KILL_SECONDS
    while (descendants := _descendants()) and time.monotonic() < deadline:
        for pid in descendants:
            _signal(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)


def _descendants() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie that its parent has yet to reap."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
