"""The processes that this package starts and ends: ranks, subjects of a selftest; with features of the Linux kernel.

A `Process` runs in a session of its own, so that Ctrl-C reaches only its parent; the kernel ends it with its parent.
`stopping_signals` is how a launcher gets signals: a graceful stop while ranks run, an immediate end otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fleet_train import timeouts
from fleet_train.errors import ClusterError, Preempted
from fleet_train.files import open_regular
from fleet_train.launch.report import signal_name

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_WORD_BYTES = 32 * os.sysconf("SC_PAGE_SIZE")  # Linux: MAX_ARG_STRLEN, with the zero byte at its end
_TAIL_BYTES = 64 * 1024
_GUARD = """
import os, signal, sys
groups = []
for line in sys.stdin:
    if line == "done\\n":
        sys.exit()
    groups.append(int(line))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
# Looked up now: a child between fork and exec may not load anything.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for this signal when the parent's thread that forked us ends, however it ends (Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def adopt_orphans() -> None:
    """Processes whose parent dies become our children instead of init's, so that we can still find and stop them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as a shell may pass it on, it would lose exit codes


def dying_with_us() -> Callable[[], None]:
    """For a child's ``preexec_fn``: it is killed when this process ends, even if that has already happened."""
    us = os.getpid()

    def in_child() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != us:
            os._exit(1)

    return in_child


def start_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: Any,
    *,
    ties_itself: bool = False,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, as `Process` describes; it gets the descriptors ``pass_fds``, too."""
    return subprocess.Popen(
        list(command),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=None if ties_itself else dying_with_us(),
        pass_fds=pass_fds,
    )


class Process:
    """A running child. A thread notices its end at once; its id is not reused until ``wait`` has returned."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: Any,
        *,
        ties_itself: bool = False,
        started: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """``output``: for stdout and stderr, as in subprocess. ``ties_itself``: the child calls `die_with_parent`, as
        no Python code may run between fork and exec in a process with unknown threads. ``started``: it runs already,
        in a session of its own. Raises OSError."""
        self.asked_to_stop = 0
        """The first signal that it got from us."""
        self.status: int | None = None
        """How it has ended, as in subprocess (negative: the signal); None while it runs."""
        self.began_at = time.monotonic()
        self.ended_at: float | None = None
        self._popen = started or start_child(command, environ, output, ties_itself=ties_itself)
        self.pid = self._popen.pid
        self.stdout = self._popen.stdout
        self._ended = threading.Event()
        self._waiter = threading.Thread(target=self._await_end, name=f"fleet_train waits for {self.pid}", daemon=True)
        self._waiter.start()

    def _await_end(self) -> None:
        self._set_ended(*self._waited())

    def _waited(self) -> tuple[int, float]:
        """(status, time of its end). Does not reap it."""
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the kernel reaps our children (SIGCHLD is ignored): the status is lost
            end = None
        at = time.monotonic()
        if end is None:
            return 0, at
        return (end.si_status if end.si_code == os.CLD_EXITED else -end.si_status), at

    def _set_ended(self, status: int, at: float) -> None:
        self.ended_at = at
        self.status = status
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self.status is not None

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        """Send it this signal, unless it has ended. Processes that it started do not get it."""
        if not self.has_ended:
            self.asked_to_stop = self.asked_to_stop or number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """SIGKILL for it and the processes that it started, unless they have left its process group."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for its end, at most this long, and reap it; returns the status."""
        if self._ended.wait(seconds):
            self._popen.poll()
        return self.status

    def give_up(self) -> None:
        """It has had SIGKILL, and hangs in a call of the kernel: it counts as ended by that."""
        if not self.has_ended:
            self._set_ended(-signal.SIGKILL, time.monotonic())


def stop(processes: Iterable[Process]) -> None:
    """SIGTERM for those that run; after 3 s SIGKILL, also for what they have started. All have ended afterwards."""
    running = [each for each in processes if not each.has_ended]
    for each in running:
        each.ask_to_stop()
    _await(running, timeouts.STOP_GRACE_SECONDS)
    for each in running:
        if not each.has_ended:
            each.kill_group()
    _await(running, timeouts.KILL_SECONDS)
    for each in running:
        each.give_up()


def _await(processes: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(each.has_ended for each in processes) and time.monotonic() < deadline:
        time.sleep(timeouts.PROCESS_POLL_SECONDS)


def kill_descendants(besides: Collection[int] = ()) -> None:
    """SIGKILL for every descendant of ours, until there is none. Ours are reaped: their status is lost. ``besides``:
    those that stay."""
    deadline = time.monotonic() + timeouts.KILL_SECONDS
    while (descendants := set(_descendants()).difference(besides)) and time.monotonic() < deadline:
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(timeouts.PROCESS_POLL_SECONDS)


def _descendants() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def end_of(log: Path, most_bytes: int = _TAIL_BYTES) -> str:
    """The end of a process's output; empty if there is nothing to read."""
    try:
        with open_regular(log) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Guard:
    """A process that outlives this one, even if it is killed, to kill the processes that our children have started.

    The kernel ends children with us, but not their children.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", _GUARD]
        nowhere = subprocess.DEVNULL
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
        )

    def add(self, pid: int) -> None:
        """A process group to kill."""
        self._send(f"{pid}\n")

    def _send(self, line: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: the kernel still ends our children
            os.write(self._popen.stdin.fileno(), line.encode())

    def dismiss(self) -> None:
        """This process ends its children itself, or leaves what they have started."""
        self._send("done\n")
        self._popen.communicate()


def why_not_started(error: OSError, command: Sequence[str], environ: Mapping[str, str]) -> ClusterError:
    """An error of one line for ranks that the kernel has refused to start."""
    why = f"{error.strerror} ({error.filename})" if error.errno != errno.E2BIG else _too_much(command, environ)
    return ClusterError(f"the ranks cannot be started: {why}")


def _too_much(command: Sequence[str], environ: Mapping[str, str]) -> str:
    words = sum(len(os.fsencode(word)) + 1 for word in command)
    variables = sum(len(os.fsencode(f"{name}={value}")) + 1 for name, value in environ.items())
    whole = os.sysconf("SC_ARG_MAX")
    return (
        f"the environment has {variables} bytes and the command {words}, and this system takes {whole} together (a "
        f"quarter of the stack's limit, ulimit -s) and {_LONGEST_WORD_BYTES} in one word; make the environment "
        "smaller, or write the arguments into a file that the script reads"
    )


GRACEFUL = (signal.SIGTERM, signal.SIGUSR1)
"""Kubernetes, Slurm and ``kill`` send SIGTERM; Slurm's ``--signal=USR1@seconds`` comes earlier."""
_HANDLED = (signal.SIGINT, signal.SIGHUP, *GRACEFUL)
_WHILE_RANKS_RUN = (signal.SIGINT, *GRACEFUL)
"""These let the ranks save first. Ctrl-C between two attempts ends the job like any program."""


class StopRequested(BaseException):
    """A closed terminal, a second signal, or Ctrl-C without a running rank. Not an Exception: no handler swallows it.

    ``may_go_on``: a graceful signal between two attempts: there is nothing to save beyond what earlier ones saved.
    """

    def __init__(self, number: int, may_go_on: bool = False) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = Preempted.exit_code if may_go_on else 128 + number


class Stopping:
    """``asked``: the graceful signal that arrived while ranks were monitored; 0 if none did."""

    def __init__(self) -> None:
        self.asked = 0
        self._watching = False
        self._has_watched = False

    @contextmanager
    def gracefully(self) -> Iterator[None]:
        """Within the block the first graceful signal is only recorded, so that the ranks can save their state."""
        self._watching = self._has_watched = True
        try:
            yield
        finally:
            self._watching = False

    def on_signal(self, number: int, _: FrameType | None) -> None:
        if number in _WHILE_RANKS_RUN and self._watching and not self.asked:
            self.asked = number
            return
        for each in _HANDLED:
            signal.signal(each, signal.SIG_IGN)
        may_go_on = number in GRACEFUL and self._has_watched and not self._watching and not self.asked
        raise StopRequested(number, may_go_on)


@contextmanager
def stopping_signals() -> Iterator[Stopping]:
    """Deliver signals to the given Stopping; after one that raises StopRequested, later ones have no effect."""
    stopping = Stopping()
    before = {number: signal.getsignal(number) for number in _HANDLED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN or number == signal.SIGTERM:  # nohup ignores SIGHUP: keep that
            signal.signal(number, stopping.on_signal)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def asked_by(number: int) -> Iterator[threading.Event]:
    """Within the block this signal sets the event."""
    asked = threading.Event()
    before = signal.signal(number, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(number, before)


def request_name(number: int) -> str:
    """``SIGTERM``; ``Ctrl-C`` for SIGINT."""
    return "Ctrl-C" if number == signal.SIGINT else signal_name(number)
