"""The spare processes of a node's ranks: each has imported what the script does first, and becomes the rank after a
failure.

What costs time at a restart is importing Paddle. A spare is started once training runs, one after the other at low
priority; it has opened no connection and touched no device (`spare` is its program).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fleet_train import timeouts
from fleet_train.cluster.installed import available_memory
from fleet_train.launch import spare
from fleet_train.launch.node import OF_ONE_ATTEMPT
from fleet_train.launch.processes import start_child
from fleet_train.launch.report import counted, signal_name
from fleet_train.launch.request import AUTO, OFF
from fleet_train.log import logger

_FIRST_SIZE_BYTES = 400 << 20
"""What a spare is taken to need, before one has been measured."""
_IMPORTS_SECONDS = 120.0
"""How long the imports of a spare may take: at low priority, beside ranks that compute."""
_ANSWER_SECONDS = 1.0
"""How long a spare, which waits for nothing else, may take to read what it is to become."""
_MEGABYTE = 1e6


@dataclass
class _Spare:
    process: subprocess.Popen[bytes]
    link: socket.socket
    environ: Mapping[str, str]
    script: object
    began_at: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    answer: bytes = b""
    has_closed: bool = False

    def hear(self) -> str:
        """What it has answered, once that is whole."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            piece = self.link.recv(1 << 12)
            self.has_closed = not piece
            self.answer += piece
        answer, end, _ = self.answer.decode(errors="replace").partition("\n")
        return answer if end else ""

    def why_hanging(self) -> str:
        is_late = time.monotonic() > self.began_at + _IMPORTS_SECONDS
        return f"its imports take longer than {_IMPORTS_SECONDS:g} s" if is_late else ""

    def end(self) -> None:
        self.link.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeouts.KILL_SECONDS)


class Spares:
    """The spares of one launcher, in all its attempts. ``command``: a rank's. ``wanted``: of ``--spares``.

    Nothing here ever ends the job: where there is no spare, a rank starts as without one.
    """

    def __init__(self, wanted: str, command: Sequence[str], is_module: bool) -> None:
        self._wanted = wanted
        self._command = list(command)
        self._script = None if is_module else Path(command[command.index("-u") + 1])
        self._waiting: dict[int, _Spare] = {}
        self._late: _Spare | None = None
        """One that was taken while it still imported."""
        self._trained: Path | None = None
        self._environ_of: Callable[[int], Mapping[str, str]] = lambda _: {}
        self._processes = 0
        self._said = ""
        self._failed = False
        self._size = 0

    @property
    def pids(self) -> set[int]:
        return {each.process.pid for each in self._waiting.values()}

    def watch(self, processes: int, environ_of: Callable[[int], Mapping[str, str]], trained: Path) -> None:
        """At the start of an attempt, with the environment of each local rank and the file that the first one writes
        once it trains."""
        self._let_go()
        self._processes, self._environ_of, self._trained, self._failed = processes, environ_of, trained, False
        with contextlib.suppress(OSError):
            trained.unlink(missing_ok=True)

    def prepare(self, environs: Sequence[Mapping[str, str]]) -> None:
        """Start them, and wait until they are ready, on a node that comes back to a running job: the others go on
        meanwhile. ``environs``: those of its ranks."""
        self._processes, self._environ_of = len(environs), environs.__getitem__
        until = time.monotonic() + _IMPORTS_SECONDS
        while self._wanted != OFF and not self._failed and time.monotonic() < until:
            self.tick(idle=True)
            if len(self._waiting) == len(environs) and all(each.is_ready for each in self._waiting.values()):
                break
            time.sleep(timeouts.WATCH_TICK_SECONDS)

    def has_trained(self) -> bool:
        """Whether a rank of this node has trained in this attempt."""
        return self._trained is not None and self._trained.exists()

    def tick(self, *, idle: bool = False) -> None:
        """Called a few times a second: start the next spare once ranks train, or hear from the one that imports.
        ``idle``: no rank runs, as in the pause after an attempt that has not trained, which has used spares up."""
        if self._wanted == OFF or self._failed:
            return
        if self._late is not None:
            self._hear_late(self._late)
        importing = next((each for each in self._waiting.values() if not each.is_ready), None)
        if importing is not None:
            self._hear(importing)
        elif len(self._waiting) < self._processes and (idle or self.has_trained()):
            self._start_next()
        elif self._waiting and not self._said:
            self._said = (
                f"after a failure {counted(len(self._waiting), 'rank')} will go on in spare processes of "
                f"{self._size / _MEGABYTE:.0f} MB (--spares 0: none)"
            )
            logger.info(self._said)

    def take(self, local: int, environ: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes] | None:
        """Let the spare of a local rank become that rank, with this environment and log; None if there is none."""
        taken = self._waiting.pop(local, None)
        if taken is None:
            return None
        problem = self._why_not(taken, environ) or self._give(taken, environ, log)
        if problem:
            logger.info(f"local rank {local} starts in a new process: {problem}")
            taken.end()
            return None
        if taken.is_ready:
            taken.link.close()
        else:
            self._late = taken
        return taken.process

    def drop_others(self) -> None:
        """After an attempt's ranks have started: those that none of them has become."""
        for each in self._waiting.values():
            each.end()
        self._waiting.clear()

    def close(self) -> None:
        self._let_go()
        self.drop_others()

    def _start_next(self) -> None:
        needed = 2 * (self._size or _FIRST_SIZE_BYTES)
        if self._wanted == AUTO and (available := available_memory()) is not None and available < needed:
            self._give_up(f"{available / _MEGABYTE:.0f} MB of memory are available (--spares 1 starts them anyway)")
            return
        local = next(local for local in range(self._processes) if local not in self._waiting)
        try:
            self._waiting[local] = self._started(local)
        except OSError as error:
            self._give_up(f"{error.strerror}")

    def _started(self, local: int) -> _Spare:
        ours, theirs = socket.socketpair()
        environ = dict(self._environ_of(local))
        command = [sys.executable, "-u", spare.__file__, str(theirs.fileno()), *self._command[2:]]
        with theirs:
            try:
                process = start_child(command, environ, subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return _Spare(process, ours, environ, self._stamp())

    def _hear(self, importing: _Spare) -> None:
        answer = importing.hear()
        if answer == spare.READY:
            importing.is_ready = True
            self._size = max(self._size, _size_of(importing.process.pid))
            return
        if problem := answer or _how_it_ended(importing.process) or importing.why_hanging():
            self._waiting = {local: each for local, each in self._waiting.items() if each is not importing}
            importing.end()
            self._give_up(problem)

    def _hear_late(self, late: _Spare) -> None:
        """It is a rank's process by now, which others reap: it goes on without us, but must not hang unnoticed."""
        if late.hear() or late.has_closed:
            self._let_go()
        elif why := late.why_hanging():
            self._give_up(why)
            with contextlib.suppress(ProcessLookupError):
                os.kill(late.process.pid, signal.SIGKILL)
            self._let_go()

    def _let_go(self) -> None:
        if self._late is not None:
            self._late.link.close()
            self._late = None

    def _give_up(self, why: str) -> None:
        """Until the next attempt."""
        self._failed = True
        line = f"no more spare processes: {why}; a restart takes some seconds longer"
        if line != self._said:
            self._said = line
            logger.info(line)

    def _why_not(self, taken: _Spare, environ: Mapping[str, str]) -> str:
        if ended := _how_it_ended(taken.process):
            return ended
        if taken.script != self._stamp():
            return "the script has been changed since its spare was started"
        names = taken.environ.keys() | environ.keys()
        changed = [name for name in names - OF_ONE_ATTEMPT if taken.environ.get(name) != environ.get(name)]
        return f"{', '.join(sorted(changed))} is another one than when its spare was started" if changed else ""

    def _give(self, taken: _Spare, environ: Mapping[str, str], log: BinaryIO) -> str:
        changes: dict[str, Any] = {
            name: environ.get(name)
            for name in taken.environ.keys() | environ.keys()
            if taken.environ.get(name) != environ.get(name)
        }
        taken.link.settimeout(_ANSWER_SECONDS)
        try:
            socket.send_fds(taken.link, [b"!"], [log.fileno()])
            taken.link.sendall(spare.framed(changes))
            taken.link.setblocking(False)
        except OSError as error:
            return f"its spare does not answer ({error})"
        return ""

    def _stamp(self) -> object:
        """What tells one state of the script from another; None for a module."""
        if self._script is None:
            return None
        with contextlib.suppress(OSError):
            state = self._script.stat()
            return state.st_ino, state.st_size, state.st_mtime_ns
        return ()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    status = process.poll()
    if status is None:
        return ""
    how = f"was ended by {signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
    return f"its spare {how}"


def _size_of(pid: int) -> int:
    """The memory that is this process's alone, in bytes."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_full_info().uss)
    return 0
