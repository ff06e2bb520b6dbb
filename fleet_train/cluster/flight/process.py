"""What ``/proc`` says of a rank's process: its state, the call of the kernel that it is in, its memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from fleet_train.cluster.flight.stands import ENDED

# Of x86-64, those in which a rank can wait long; other numbers are shown as they are.
_CALLS: dict[str, str] = dict(
    re.findall(
        r"(\d+) (\w+)",
        "0 read, 1 write, 7 poll, 17 pread64, 18 pwrite64, 23 select, 42 connect, 45 recvfrom, 47 recvmsg, 61 wait4, "
        "74 fsync, 75 fdatasync, 202 futex, 230 clock_nanosleep, 232 epoll_wait, 247 waitid, 257 openat, "
        "262 newfstatat, 270 pselect6, 271 ppoll, 281 epoll_pwait",
    )
)
_OF_A_FILE = ("read", "write", "pread64", "pwrite64", "fsync", "fdatasync", "recvfrom", "recvmsg")
_MANY_FAULTS = 8, 50  # in all, and per second


# A thread that has run so long, or so often, could have let go of Python's lock, or taken it.
_ENOUGH_SECONDS, _ENOUGH_TURNS = 0.1, 20
Turns = Mapping[int, "Turn"]
"""The turns of a process's threads, by a thread's native id."""


class Turn(NamedTuple):
    """What a thread has had of processors, in seconds since it began."""

    ran: float
    ready: float
    """Seconds in which the thread waited for a processor."""
    turns: int
    is_ready: bool
    """Whether the thread is ready or runs now: the kernel adds a wait to ``ready`` when that is over."""


def turns_of(pid: int) -> Turns:
    """How long a process's threads ran, and waited for a processor; empty where the kernel does not tell."""
    turns = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                ran, ready, count = map(int, Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split())
                letter = _stat(f"/proc/{pid}/task/{thread}/stat")[0]
                turns[int(thread)] = Turn(ran / 1e9, ready / 1e9, count, letter == "R")
    return turns


def lacks_processor(before: Turns, later: Turns, helper: int, seconds: float) -> str:
    """Say in words that a process lacked a processor for ``seconds`` in which ``helper``, its recorder's thread, did
    not get Python's lock; empty if it did not, and some native code keeps the lock.

    The recorder's thread wakes up 200 times a second while it waits for the lock: where it got to run as often, another
    thread has the lock; and that one could have let go of it if it ran itself.
    """
    waits = {
        thread: (one.ran - before[thread].ran, _waited(before[thread], one, seconds), one.turns - before[thread].turns)
        for thread, one in later.items()
        if thread in before
    }
    total = sum(ran for ran, _, _ in waits.values())
    _, ready, turns = waits.pop(helper, (0.0, 0.0, _ENOUGH_TURNS))
    ran, most_ready = (max((wait[part] for wait in waits.values()), default=0.0) for part in (0, 1))
    helper_waited = turns < _ENOUGH_TURNS and ready >= seconds / 2
    others_waited = ran < _ENOUGH_SECONDS and most_ready >= seconds / 2
    if not helper_waited and not others_waited:
        return ""
    longest = max(ready, most_ready) if helper_waited else most_ready
    return f"lacks a processor (in {seconds:.1f} s it ran for {total:.2f} s, and was ready to run for {longest:.2f} s)"


def _waited(before: Turn, later: Turn, seconds: float) -> float:
    """Seconds in which a thread waited. A wait that has not ended is not counted yet: of a thread that is ready at the
    end, all that it did not run."""
    counted = later.ready - before.ready
    is_waiting = later.is_ready and (before.is_ready or later.turns - before.turns < _ENOUGH_TURNS)
    return min(seconds, max(counted, seconds - (later.ran - before.ran)) if is_waiting else counted)


@dataclass(frozen=True)
class ProcessState:
    """The state of a process. ``letter``: of its main thread, as in ``ps``; empty if it has ended. ``at``: of
    ``time.perf_counter``."""

    pid: int
    at: float
    letter: str = ""
    parent: int = 0
    memory_bytes: int = 0
    """Bytes of the process that are resident on the host."""
    faults: int = 0
    """Pages that the process's threads had to read from a disk."""
    lacks_processor: str = ""
    """What the function `lacks_processor` says of the process, where it was asked."""

    @classmethod
    def of(cls, pid: int) -> ProcessState:
        at = perf_counter()
        try:
            letter = _stat(f"/proc/{pid}/task/{pid}/stat")[0]
            fields = _stat(f"/proc/{pid}/stat")
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            return cls(pid, at, letter, int(fields[1]), pages * os.sysconf("SC_PAGE_SIZE"), int(fields[9]))
        except (OSError, IndexError, ValueError):
            return cls(pid, at)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or only waits for its parent to read its exit code."""
        return self.letter in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self.letter in ("T", "t")

    def is_kept(self, later: ProcessState) -> bool:
        """Whether the kernel keeps the process from going on, at both times: a moment in a read of the disk is none."""
        return self.is_stopped or (self.letter == later.letter == "D")

    def words(self, later: ProcessState, *, keeps_lock: bool) -> str:
        """What keeps the process, in words; empty if nothing of this kind does. ``later``: a moment afterwards."""
        if self.has_ended:
            return ENDED
        faults = later.faults - self.faults
        pages = ""
        if faults >= _MANY_FAULTS[0] and faults >= _MANY_FAULTS[1] * (later.at - self.at):
            pages = f"waits for its memory to be read from the disk ({faults} page faults meanwhile: swapping?)"
        function = _first_line(f"/proc/{self.pid}/task/{self.pid}/wchan")
        kernel = ", ".join(filter(None, (function if function != "0" else "", _call_of(self.pid))))
        if self.is_stopped:
            return f"is stopped by a {'signal' if self.letter == 'T' else 'debugger'} (state {self.letter})"
        if self.is_kept(later):
            sleeps = f"sleeps in the kernel (state D{kernel and f', {kernel}'})"
            return " and ".join(filter(None, (sleeps, pages)))
        if pages:
            return pages
        if keeps_lock and later.lacks_processor:
            return later.lacks_processor
        if keeps_lock and self.letter == "R":
            return "computes in native code that keeps Python's lock (state R)"
        if keeps_lock:
            return f"waits in native code that keeps Python's lock (state {self.letter}{kernel and f', {kernel}'})"
        return ""

    def words_of_unknown(self) -> str:
        """The state in words of a process that records nothing."""
        return self.words(self, keeps_lock=False) or f"has not imported fleet_train yet (state {self.letter})"


def _call_of(pid: int) -> str:
    """The call of the kernel that a process is in: ``read of /mnt/data/part-7``; empty if none can be seen."""
    words = _first_line(f"/proc/{pid}/task/{pid}/syscall").split()
    if len(words) < 2 or not words[0].isdecimal():
        return ""
    name = _CALLS.get(words[0], f"system call {words[0]}")
    if name in _OF_A_FILE:
        with contextlib.suppress(OSError, ValueError):
            return f"{name} of {os.readlink(f'/proc/{pid}/fd/{int(words[1], 16)}')}"
    return name


def _stat(path: str) -> list[str]:
    """The fields of ``stat`` behind the command's name, which may hold anything."""
    return Path(path).read_text(errors="replace").rpartition(")")[2].split()


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").partition("\n")[0]
    except OSError:
        return ""
