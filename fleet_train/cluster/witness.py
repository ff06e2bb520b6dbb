"""The witness: where the ranks of this machine stand, seen from another process.

It finds ranks by the anonymous file of their flight recorders, asks each for the stacks of its threads, and reads from
``/proc`` why one cannot answer: stopped, asleep in the kernel, or in native code that keeps Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fleet_train import timeouts
from fleet_train.cluster import flight
from fleet_train.cluster.stands import ENDED, Stand, parse
from fleet_train.files import publish

# Of x86-64, those in which a rank can wait long; other numbers are shown as they are.
_CALLS = dict(
    re.findall(
        r"(\d+) (\w+)",
        "0 read, 1 write, 7 poll, 17 pread64, 18 pwrite64, 23 select, 42 connect, 45 recvfrom, 47 recvmsg, 61 wait4, "
        "74 fsync, 75 fdatasync, 202 futex, 230 clock_nanosleep, 232 epoll_wait, 247 waitid, 257 openat, "
        "262 newfstatat, 270 pselect6, 271 ppoll, 281 epoll_pwait",
    )
)
_libc, _TGKILL = ctypes.CDLL(None, use_errno=True), 234 if os.uname().machine == "x86_64" else 131
_MOST_TEXT_BYTES = 1 << 20
_MANY_FAULTS = 8, 50  # in all, and per second
_OF_A_FILE = ("read", "write", "pread64", "pwrite64", "fsync", "fdatasync", "recvfrom", "recvmsg")


_WAITS = ("wait", "call", "save", "barrier", "wire")
_INNERMOST = ("run", "loader", "evaluate", "copy", "code", *_WAITS)
_WANTED, _WITNESS = "stacks/wanted/", "stacks/witness/"


class Client(Protocol):
    """What is needed of the store's client."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> Any: ...

    def keys(self, prefix: str) -> list[str]: ...


class Witness:
    """Answers for the ranks of a node, which ``find`` finds, when a rank elsewhere asks over the job's store."""

    def __init__(
        self,
        client: Client,
        node: int,
        processes: int,
        find: Callable[[], list[Seen]],
        write: Callable[[Iterable[Stand], Iterable[Seen]], None] = lambda *_: None,
    ) -> None:
        """``processes``: how many ranks the node has. ``write`` gets what `write_files` does, after each question."""
        self._client = client
        self._processes = processes
        self._find = find
        self._write = write
        self.stands: dict[int, Stand] = {}
        """Where each rank stood when it was last asked."""
        self._seen: list[Seen] = []
        self._answered: set[str] = set()
        self._look_again_at = 0.0
        self._failed_at: dict[int, float] = {}
        self._pause = timeouts.WITNESS_FIRST_SECONDS
        self._node: int | None = node
        """Not yet announced in the store."""

    def answer(self) -> None:
        """Called a few times a second. Raises FleetTrainError if the store does not answer."""
        if self._node is not None:
            self._client.set(f"{_WITNESS}{self._node}", self._processes)
            self._node = None
        self.seen()
        new = set(self._client.keys(_WANTED)) - self._answered
        self._answered |= new
        for key in sorted(new):
            wanted, resume = self._client.get(key)
            answers = self.look(wanted or None, resume=resume)
            for stand in answers:
                self._client.set(f"{key.replace(_WANTED, 'stacks/')}/{stand.rank}", stand.to_json())
            if wanted:
                self.look(resume=resume)  # of the others, while they still wait

    def seen(self) -> list[Seen]:
        """The node's ranks, by rank, also those that have ended since; looks for those that it has not seen, less and
        less often."""
        if len(self._seen) < self._processes and time.monotonic() >= self._look_again_at:
            self._look_again_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, timeouts.WITNESS_LAST_SECONDS)
            known = {each.pid for each in self._seen}
            found = self._find()
            for each in found:
                if each.pid in known:
                    each.close()
            self._seen = one_of_each([*self._seen, *(each for each in found if each.pid not in known)])
        return self._seen

    def look(self, ranks: Collection[int] | None = None, *, resume: bool = False) -> list[Stand]:
        """Where the node's ranks stand, or these; see the function of this name.

        ``resume`` means a failure. Where ranks stood a moment ago, when the first of them asked, is kept then: since
        then they have learned of the failure, or have gone on.
        """
        now = time.monotonic()
        kept = {rank for rank, at in self._failed_at.items() if resume and now - at < timeouts.STACKS_RECENT_SECONDS}
        asked = [each for each in self.seen() if ranks is None or each.ring().rank in ranks]
        new = look([each for each in asked if each.ring().rank not in kept], resume=resume)
        self.stands |= {stand.rank: stand for stand in new}
        if resume:
            self._failed_at |= {stand.rank: now for stand in new}
        self._write(new, self.seen())
        return [self.stands[each.ring().rank] for each in asked]

    def close(self) -> None:
        for each in self._seen:
            each.close()


def ask(
    client: Client, name: str, ranks: Iterable[int] = (), nodes: Iterable[int] = (), *, resume: bool = False
) -> list[Stand]:
    """Where ranks of the job stand, by the witnesses of these nodes; without those that do not answer within seconds.
    Without ``ranks``: all ranks of the nodes that have a witness.

    ``name``: the same for all that ask for the same reason, who then share the answer. ``resume``: as of `look`.
    """
    known = set(client.keys(_WITNESS))
    wanted = sorted(ranks)
    if not known.issuperset(f"{_WITNESS}{node}" for node in nodes):
        return []
    count = len(wanted) or sum(int(client.get(key) or 0) for key in known)
    key = hashlib.sha256(name.encode()).hexdigest()[:16]
    client.set(f"{_WANTED}{key}", [wanted, resume])
    answers: list[str] = []
    until = time.monotonic() + timeouts.STACKS_ASK_SECONDS
    while len(answers) < count and time.monotonic() < until:
        time.sleep(timeouts.STACKS_ASK_AGAIN_SECONDS)
        answers = client.keys(f"stacks/{key}/")
    return sorted((Stand.from_json(client.get(answer)) for answer in answers), key=lambda stand: stand.rank)


def stacks_name(rank: int) -> str:
    return f"stacks.{rank}.txt"


def flight_name(rank: int) -> str:
    """The ring of its flight recorder, which ``timeline`` reads."""
    return f"flight.{rank}.bin"


JOB_FILE = "job.json"


def write_job(folder: Path, store: str, job: str) -> None:
    """Write where a job's store is, for commands that are given its log folder. Raises OSError."""
    publish(folder / JOB_FILE, json.dumps({"store": store, "job": job}).encode(), f"{JOB_FILE}.tmp")


def write_files(folder: Path, stands: Iterable[Stand], seen: Iterable[Seen]) -> None:
    """Write the stacks of ranks, and the recorders of these and of ranks that have ended. Raises OSError."""
    files = {stacks_name(stand.rank): "\n".join([*stand.lines(whole=True), ""]).encode() for stand in stands}
    files |= {flight_name(each.ring().rank): each.data() for each in seen}
    for name, content in files.items():
        publish(folder / name, content, f"{name}.tmp")


class Seen:
    """A rank of this machine whose recorder is open here: its ring can be read after its process has ended."""

    def __init__(self, pid: int, descriptor: int, ring: flight.Ring) -> None:
        self.pid = pid
        self._file = descriptor
        self._ring = ring

    def data(self) -> bytes:
        return os.pread(self._file, flight.RING_BYTES, 0)

    def ring(self) -> flight.Ring:
        self._ring = flight.read_ring(self.data()) or self._ring
        return self._ring

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Ask for its stacks; in the body no other process does."""
        self._lock()
        try:
            os.ftruncate(self._file, flight.RING_BYTES)
            flight.ask(self._file)
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> None:
        until = time.monotonic() + timeouts.STACKS_LOCK_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(timeouts.STACKS_POLL_SECONDS)

    def has_answered(self) -> bool:
        """Whether its recorder's thread has written the stacks that were asked for."""
        return flight.has_answered(self._file)

    def text(self) -> str:
        """The stacks that it has written so far."""
        return os.pread(self._file, _MOST_TEXT_BYTES, flight.RING_BYTES).decode(errors="replace")

    def signal(self, *, main: bool = False) -> bool:
        """Make ``faulthandler`` write the stacks: on the recorder's thread, wherever the others are, or on the main
        one, before it takes another step. False if it has no such handler yet: the signal would end it."""
        helper = self.ring().helper
        try:
            caught = int(_field(f"/proc/{self.pid}/status", "SigCgt"), 16)
            if not helper or not caught >> (flight.STACKS_SIGNAL - 1) & 1:
                return False
            return bool(_libc.syscall(_TGKILL, self.pid, self.pid if main else helper, flight.STACKS_SIGNAL) == 0)
        except (OSError, ValueError):
            return False


def ranks_here(among: Callable[[int], bool] = lambda _: True) -> list[Seen]:
    """The ranks of this machine whose process ``among`` accepts, and that this user may look at. Close them."""
    seen: list[Seen] = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and among(int(entry)):
            seen += _opened(int(entry))
    return seen


def _opened(pid: int) -> Iterator[Seen]:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            if not os.readlink(path).startswith(f"/memfd:{flight.FILE_NAME} "):
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            ring = flight.read_ring(os.pread(descriptor, flight.RING_BYTES, 0))
            if ring is not None and ring.pid == pid:  # a child may have inherited the file
                yield Seen(pid, descriptor, ring)
                return
            os.close(descriptor)


def session_of(pid: int) -> int:
    """The session that a process belongs to; -1 if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def is_alive(pid: int) -> bool:
    return _State.of(pid).is_alive


def one_of_each(seen: Iterable[Seen]) -> list[Seen]:
    """One process for each rank: the one that has joined, not a child that has imported the package as well. Closes the
    others."""
    chosen: dict[int, Seen] = {}
    for each in sorted(seen, key=lambda each: (not each.ring().has_joined, each.pid)):
        if chosen.setdefault(each.ring().rank, each) is not each:
            each.close()
    return [chosen[rank] for rank in sorted(chosen)]


def look(seen: Sequence[Seen], *, resume: bool = False, native: bool = False) -> list[Stand]:
    """Where these ranks stand; takes a second or two where one does not answer.

    ``resume``: a rank that is stopped goes on (SIGCONT) and can answer: it is going to be ended anyway. ``native``:
    with C++ frames, by py-spy, where that is installed.
    """
    with contextlib.ExitStack() as asked:
        before = {each.pid: _State.of(each.pid) for each in seen}
        alive = [each for each in seen if before[each.pid].is_alive]
        for each in alive:
            asked.enter_context(each.asked())
        silent = [each for each in alive if not before[each.pid].is_stopped]
        silent = _await(silent, Seen.has_answered, timeouts.STACKS_ANSWER_SECONDS)
        kept = {each.pid for each in silent}  # Python's lock, or all of the processor
        for each in alive:
            if resume and before[each.pid].is_stopped:
                each.signal(main=True)  # it waits there
                with contextlib.suppress(OSError):
                    os.kill(each.pid, signal.SIGCONT)
                silent.append(each)
        silent = [each for each in silent if each.pid not in kept or each.signal()]
        _await(silent, _is_quiet(), timeouts.STACKS_SIGNAL_SECONDS)
        return [_stand(each, before[each.pid], each.pid in kept, native) for each in seen]


def _await(seen: Iterable[Seen], is_done: Callable[[Seen], bool], seconds: float) -> list[Seen]:
    """Those that were not done in time."""
    until, waiting = time.monotonic() + seconds, list(seen)
    while waiting and time.monotonic() < until:
        time.sleep(timeouts.STACKS_POLL_SECONDS)
        waiting = [each for each in waiting if not is_done(each)]
    return waiting


def _is_quiet() -> Callable[[Seen], bool]:
    """Whether a handler has written the main thread's stack, the last one, and no more since the last question."""
    sizes: dict[int, int] = {}

    def is_quiet(each: Seen) -> bool:
        text = each.text()
        before, sizes[each.pid] = sizes.get(each.pid, 0), len(text)
        return 0 < before == len(text) and any(thread.is_main for thread in parse(text, each.ring().main_ident))

    return is_quiet


def _stand(each: Seen, before: _State, keeps_lock: bool, native: bool) -> Stand:
    ring, now = each.ring(), _State.of(each.pid)
    threads = parse(each.text(), ring.main_ident) if before.is_alive else ()
    unfinished = [event for event in ring.events if not event.ended and event.kind in _INNERMOST]
    doing = max(unfinished, key=lambda event: _INNERMOST.index(event.kind), default=None)
    what = "" if doing is None else " ".join(filter(None, (doing.kind, doing.name)))
    state = before.words(now, keeps_lock=keeps_lock)
    waits = doing is not None and doing.kind in _WAITS and state in ("", ENDED)
    return Stand(ring.rank, each.pid, ring.step, what, waits, state, threads, _native(each.pid) if native else "")


@dataclass(frozen=True)
class _State:
    """Of a process's main thread, by ``/proc``. ``letter``: as in ``ps``; empty if it has ended."""

    letter: str = ""
    kernel: str = ""
    """The function of the kernel in which it sleeps, where the kernel tells that."""
    call: str = ""
    """The system call, with its file."""
    faults: int = 0
    """Pages that all its threads had to read from a disk."""
    at: float = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or might: not once its parent has only its exit code to read."""
        return self.letter not in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self.letter in ("T", "t")

    @classmethod
    def of(cls, pid: int) -> _State:
        try:
            letter = _stat(f"/proc/{pid}/task/{pid}/stat")[0]
            faults = int(_stat(f"/proc/{pid}/stat")[9])
        except (OSError, IndexError, ValueError):
            return cls()
        kernel = _first_line(f"/proc/{pid}/task/{pid}/wchan")
        return cls(letter, kernel if kernel != "0" else "", _call_of(pid), faults, time.monotonic())

    def words(self, later: _State, *, keeps_lock: bool) -> str:
        """What keeps the process, in words; empty if nothing of this kind does. ``later``: a moment afterwards."""
        if not self.is_alive:
            return ENDED
        kernel = f", {self.kernel}" if self.kernel else ""
        faults = later.faults - self.faults
        pages = ""
        if faults >= _MANY_FAULTS[0] and faults >= _MANY_FAULTS[1] * (later.at - self.at):
            pages = f"waits for its memory to be read from the disk ({faults} page faults meanwhile: swapping?)"
        match self.letter:
            case "T":
                return "is stopped by a signal (state T)"
            case "t":
                return "is stopped by a debugger (state t)"
            case "D":
                sleeps = f"sleeps in the kernel (state D{kernel}{self.call and f', {self.call}'})"
                return " and ".join(filter(None, (sleeps, pages)))
        if pages:
            return pages
        if keeps_lock and self.letter == "R":
            return "computes in native code that keeps Python's lock (state R)"
        if keeps_lock:
            return f"waits in native code that keeps Python's lock (state {self.letter}{kernel}, {self.call})"
        return ""


def _call_of(pid: int) -> str:
    """``read of /mnt/data/part-7``, ``futex``; empty if it is in none, or that may not be read."""
    words = _first_line(f"/proc/{pid}/task/{pid}/syscall").split()
    if len(words) < 2 or not words[0].isdecimal():
        return ""
    name = str(_CALLS.get(words[0], f"system call {words[0]}"))
    if name in _OF_A_FILE:
        with contextlib.suppress(OSError, ValueError):
            return f"{name} of {os.readlink(f'/proc/{pid}/fd/{int(words[1], 16)}')}"
    return name


def _stat(path: str) -> list[str]:
    """The fields behind the command's name, which may hold anything."""
    return Path(path).read_text(errors="replace").rpartition(")")[2].split()


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text(errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise ValueError(f"{path} has no {name}")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").partition("\n")[0]
    except OSError:
        return ""


def _native(pid: int) -> str:
    tool = shutil.which("py-spy")
    if tool is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [tool, "dump", "--native", "--nonblocking", "--pid", str(pid)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.STACKS_NATIVE_SECONDS)
        return ended.stdout.strip() if ended.returncode == 0 else ""
    return ""
