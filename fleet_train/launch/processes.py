"""Starting the stock launcher and stopping all processes that it started, with features of the Linux kernel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from fleet_train.errors import ClusterError, Preempted
from fleet_train.files import LOCK, hold, holder
from fleet_train.launch import paddle_launch_main, worker_main
from fleet_train.launch.node import Node
from fleet_train.launch.rendezvous.round import Say
from fleet_train.launch.report import signal_name

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


# Signals to a launcher: a graceful stop while ranks run, an immediate end otherwise.


GRACEFUL = (signal.SIGTERM, signal.SIGUSR1)
"""Kubernetes, Slurm and ``kill`` send SIGTERM; Slurm's ``--signal=USR1@seconds`` comes earlier."""
_HANDLED = (signal.SIGINT, signal.SIGHUP, *GRACEFUL)


class StopRequested(BaseException):
    """Ctrl-C, a closed terminal, or a second signal. Not an Exception, so that no handler swallows it.

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
        if number in GRACEFUL and self._watching and not self.asked:
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


def request_name(number: int) -> str:
    """``SIGTERM``; ``Ctrl-C`` for SIGINT."""
    return "Ctrl-C" if number == signal.SIGINT else signal_name(number)


# The command line of ``paddle.distributed.launch`` that starts this node's ranks, and its private folder.


# It cannot be made as a folder, so the stock launcher cannot write <job>.<pod>.log, which starts with str(os.environ).
_JOB_ID = "/dev/null/fleet_train"


def stock_command(
    node: Node, program: tuple[str, ...], *, is_module: bool, log_dir: Path, token: str, private: Path
) -> list[str]:
    """The command that starts the ranks: the stock launcher, with our wrapper as the script of every rank.

    Without devices it does not need Paddle's core, and starts in a tenth of the time without it.
    """
    command = [sys.executable, *([] if node.devices else [paddle_launch_main.__file__])]
    command += ["-m", "paddle.distributed.launch"]
    command += [f"--ips={','.join(node.addresses)}", f"--host={node.address}", f"--start_port={node.started_port}"]
    command += [f"--devices={','.join(node.devices)}"] if node.devices else [f"--nproc_per_node={node.processes}"]
    command += [f"--log_dir={private}", f"--job_id={_JOB_ID}", "--enable_gpu_log=False"]
    # The program is one word: the launcher's parser searches every word for flags of its own, even after the
    # script, and stops with "ambiguous option" at a script's --a or --n.
    return [*command, worker_main.__file__, str(log_dir), token, program_word(program, is_module)]


def program_word(program: tuple[str, ...], is_module: bool) -> str:
    """The script, or module, and its arguments as the wrapper gets them."""
    return json.dumps([*(["-m"] if is_module else []), *program])


class PrivateFolder:
    """A folder for the stock launcher's own files, readable by this user only.

    It writes the whole environment into ``envlog.N`` and ``backup_env.RANK.json``: both link to /dev/null here.
    """

    def __init__(self, ranks: range) -> None:
        remove_abandoned_folders()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=worker_main.PRIVATE_PREFIX))
            with suppress(BlockingIOError):  # another launcher is removing it already
                self._held = hold(self.path)
                if self.path.is_dir():
                    break
        for local, rank in enumerate(ranks):
            (self.path / f"envlog.{local}").symlink_to("/dev/null")
            (self.path / f"backup_env.{rank}.json").symlink_to("/dev/null")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held is not None:
            self._held.close()


def remove_abandoned_folders() -> None:
    """Remove the folders of this user's launchers that were killed together with their ranks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{worker_main.PRIVATE_PREFIX}*"):
        with suppress(OSError):
            about = folder.lstat()
            if about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode):
                remove_abandoned(folder)


# Folders locked by one launcher for its lifetime: the kernel releases the lock, however the launcher ends.


# Of this process: requested folder -> assigned folder, and its lock.
_taken: dict[Path, tuple[Path, BinaryIO | None]] = {}


def take_log_dir(wanted: Path, say: Say) -> Path:
    """The folder for this launcher's logs, in all attempts: ``wanted``, or one next to it if another job uses it.

    Creates it. Raises OSError if it is not writable.
    """
    if wanted in _taken:
        return _taken[wanted][0]
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}.{number}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = hold(folder)
        except BlockingIOError:
            continue
        if number > 1:
            say(
                f"{wanted} is in use by another job ({holder(wanted)}); the logs of this one go to {folder} (--log_dir)"
            )
        _taken[wanted] = folder, held
        break
    return _taken[wanted][0]


def remove_abandoned(folder: Path) -> None:
    """Remove it if the process that held it has ended; not if that is unknown."""
    with suppress(OSError), (folder / LOCK).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
