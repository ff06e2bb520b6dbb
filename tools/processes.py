"""Processes that a tool starts: each in a session of its own, and none left behind, whatever ends the tool."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Have SIGTERM, SIGINT and SIGHUP run the ``finally`` blocks, once; only the main thread can set that up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for each in before:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def start(command: Sequence[str], log: Path | None, environ: Mapping[str, str], folder: Path | None = None) -> Process:
    """Start a command; its output goes to a file, or to this terminal. It gets Ctrl-C only through this process."""
    if log is None:
        return subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True)
    with log.open("ab") as sink:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, **streams)


def stop(processes: Sequence[Process], seconds: float) -> None:
    """SIGTERM, also to stopped processes: launchers end their ranks then. What still runs after so long is killed with
    what it has started."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
