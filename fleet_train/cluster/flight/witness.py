"""The witness: where the ranks of this machine stand, seen from another process.

It finds ranks by the anonymous file of their flight recorders, asks each for the stacks of its threads, and reads from
``/proc`` why one cannot answer: stopped, asleep in the kernel, without a processor, or in native code that keeps
Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fleet_train import timeouts
from fleet_train.cluster.flight.process import ProcessState, Turns, lacks_processor, turns_of
from fleet_train.cluster.flight.ring import (
    FILE_NAME,
    RING_BYTES,
    STACKS_SIGNAL,
    Ring,
    ask_for_stacks,
    has_answered,
    has_joined,
    read_ring,
)
from fleet_train.cluster.flight.rows import Row, is_silent, row_of
from fleet_train.cluster.flight.stands import Stand, parse
from fleet_train.errors import printable
from fleet_train.files import publish

_STACKS_ANSWER_SECONDS = 1.0
"""How long the recorder's thread has to get Python's lock and to write: then a signal makes it write without."""
_STACKS_SIGNAL_SECONDS, _STACKS_QUIET_SECONDS = 2.0, 0.2
"""How long a rank's handler of that signal has to write, which takes milliseconds where the machine is not busy; and
how long after its last word it counts as done."""
_STACKS_LOCK_SECONDS = 2.0
"""How long a process that asks a rank for its stacks waits for another one that asks the same rank."""
_STACKS_POLL_SECONDS = 0.02
"""Pause between two looks at whether a rank has written its stacks, or another process has asked it."""
_STACKS_RECENT_SECONDS = 15.0
"""How long the stacks seen at a failure stand for it: a rank's report and the launchers' patience take no longer."""
_WITNESS_FIRST_SECONDS, _WITNESS_LAST_SECONDS = 0.5, 10.0
"""Pause between two searches for ranks that have not begun to record, at first and at most."""
_STACKS_NATIVE_SECONDS = 10.0
"""How long py-spy may take, which reads the symbols of all libraries."""
_TOP_TURNS_SECONDS = 0.3
"""How long ``top`` watches a silent rank to see whether it runs, or only waits for a processor."""

_libc, _TGKILL = ctypes.CDLL(None, use_errno=True), 234 if os.uname().machine == "x86_64" else 131
_MOST_TEXT_BYTES = 1 << 20
_OUTERMOST = ("<module>", "_run_module_as_main")
T = TypeVar("T")


STACKS, ROWS, FAILURE = "stacks", "rows", "failure"
"""Questions to a witness. After a failure, a stopped rank goes on, to show its stack."""
_WANTED, _WITNESS = "stacks/wanted/", "stacks/witness/"


class Client(Protocol):
    """The part of the store's client that a witness needs."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> Any: ...

    def keys(self, prefix: str) -> list[str]: ...


class Witness:
    """The witness of a node's ranks, which ``find`` finds: answers when a rank elsewhere asks over the job's store."""

    def __init__(
        self,
        client: Client,
        node: int,
        processes: int,
        find: Callable[[], list[Seen]],
        running: Callable[[], Mapping[int, int]] = dict,
        write: Callable[[Iterable[Stand], Iterable[Seen]], None] = lambda *_: None,
    ) -> None:
        """``processes``: how many ranks the node has. ``running``: rank -> process, for those that have been started
        and not ended, where that is known. ``write`` gets what `write_files` does, after each question.
        """
        self._client = client
        self._processes = processes
        self._find = find
        self._running = running
        self._write = write
        self.stands: dict[int, Stand] = {}
        """The stand of each rank when it was last asked."""
        self._seen: list[Seen] = []
        self._answered: dict[str, Any] = {}
        self._all_joined = False
        self._look_again_at = 0.0
        self._failed_at: dict[int, float] = {}
        self._pause = _WITNESS_FIRST_SECONDS
        self._node: int | None = node
        """The node that is not yet announced in the store; None once it is."""

    def answer(self) -> None:
        """Called a few times a second. Raises FleetTrainError if the store does not answer."""
        if self._node is not None:
            self._client.set(f"{_WITNESS}{self._node}", self._processes)
            self._node = None
        seen = self.seen()
        for key in self._client.keys(_WANTED):
            question = self._client.get(key)
            if question == self._answered.get(key):
                continue
            self._answered[key] = question
            try:
                number, what, wanted = question
                wanted = [int(rank) for rank in wanted]
            except (TypeError, ValueError, OverflowError):  # whoever may connect to the store may write anything
                continue
            if what == ROWS:
                answers = {ring.rank: row_of(ring, process).to_json() for ring, process in looked_at(seen)}
            else:
                stands = self.look(wanted or None, resume=what == FAILURE)
                answers = {stand.rank: stand.to_json() for stand in stands}
            for rank, answer in answers.items():
                self._client.set(f"{key.replace(_WANTED, 'stacks/')}/{rank}", [number, answer])
            if what == FAILURE:
                self.look(resume=True)  # of the others, while they still wait

    def seen(self, *, now: bool = False) -> list[Seen]:
        """The node's ranks, by rank, also those that have ended since; looks for those that it has not seen join the
        job, less and less often, or now."""
        self._all_joined = self._all_joined or sum(each.has_joined() for each in self._seen) >= self._processes
        if not self._all_joined and (now or time.monotonic() >= self._look_again_at):
            self._look_again_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _WITNESS_LAST_SECONDS)
            known = {each.pid for each in self._seen}
            found = self._find()
            for each in found:
                if each.pid in known:
                    each.close()
            self._seen = one_of_each([*self._seen, *(each for each in found if each.pid not in known)])
        return self._seen

    def look(self, ranks: Collection[int] | None = None, *, resume: bool = False) -> list[Stand]:
        """Find out where the node's ranks stand, or only ``ranks``; see the function of this name.

        ``resume`` means a failure. Where ranks stood a moment ago, when the first of them asked, is kept then: since
        then they have learned of the failure, or have gone on.
        """
        now = time.monotonic()
        kept = {rank for rank, at in self._failed_at.items() if resume and now - at < _STACKS_RECENT_SECONDS}
        asked = [each for each in self.seen(now=True) if ranks is None or each.ring().rank in ranks]
        new = look([each for each in asked if each.ring().rank not in kept], resume=resume)
        known = {each.ring().rank for each in self.seen()}
        new += [
            Stand(rank, pid, 0, "", False, ProcessState.of(pid).words_of_unknown(), ())
            for rank, pid in self._running().items()
            if rank not in known and rank not in kept and (ranks is None or rank in ranks)
        ]
        self.stands |= {stand.rank: stand for stand in new}
        if resume:
            self._failed_at |= {stand.rank: now for stand in new}
        self._write(new, self.seen())
        return [stand for rank, stand in sorted(self.stands.items()) if ranks is None or rank in ranks]

    def close(self) -> None:
        for each in self._seen:
            each.close()


def ask(client: Client, what: str) -> list[Any]:
    """Ask as a visitor for the `Stand` or the `Row` of each rank of a job, by rank; without those whose witness does
    not answer within seconds. ``what``: STACKS or ROWS. Another visitor who asks at the same time may get our
    answer."""
    told = [client.get(key) for key in client.keys(_WITNESS)]
    count = sum(each for each in told if type(each) is int)  # whoever may connect to the store may write anything
    read = Row.from_json if what == ROWS else Stand.from_json
    return _ask(client, f"visitor {what}", [secrets.randbits(31), what, []], count, read)


def ask_about(client: Client, failure: str, ranks: Collection[int], nodes: Collection[int]) -> list[Stand]:
    """Ask where ranks of these nodes stand whom others miss; without those whose witness does not answer within
    seconds.

    ``failure``: the same text for all that ask for the same reason, who then share the answer.
    """
    if not set(client.keys(_WITNESS)).issuperset(f"{_WITNESS}{node}" for node in nodes):
        return []
    slot = hashlib.sha256(failure.encode()).hexdigest()[:16]
    return _ask(client, slot, [0, FAILURE, sorted(ranks)], len(ranks), Stand.from_json)


def _ask(client: Client, slot: str, question: list[Any], count: int, read: Callable[[Any], T]) -> list[T]:
    """The answers in a place of the store that each question of its kind uses again: a store has a limit. What ``read``
    raises a ValueError for is none."""
    client.set(f"{_WANTED}{slot}", question)
    answers: dict[int, T] = {}
    until = time.monotonic() + timeouts.STACKS_ASK_SECONDS
    while len(answers) < count and time.monotonic() < until:
        time.sleep(timeouts.STACKS_ASK_AGAIN_SECONDS)
        for key in client.keys(f"stacks/{slot}/"):
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                number, answer = client.get(key)
                if number == question[0]:
                    answers[int(key.rpartition("/")[2])] = read(answer)
    return [answers[rank] for rank in sorted(answers)]


def stacks_name(rank: int) -> str:
    return f"stacks.{rank}.txt"


def flight_name(rank: int) -> str:
    """The name of a file with the ring of a rank's flight recorder, which ``timeline`` reads."""
    return f"flight.{rank}.bin"


JOB_FILE = "job.json"


def write_job(folder: Path, store: str, job: str) -> None:
    """Write where a job's store is, for commands that are given its log folder. Raises OSError."""
    publish(folder / JOB_FILE, json.dumps({"store": store, "job": job}).encode(), f"{JOB_FILE}.tmp")


def write_files(folder: Path, stands: Iterable[Stand], seen: Iterable[Seen]) -> None:
    """Write the stacks of ranks, and the recorders of these and of ranks that have ended. Raises OSError."""
    files = {stacks_name(stand.rank): printable("\n".join([*stand.lines(whole=True), ""])).encode() for stand in stands}
    files |= {flight_name(each.ring().rank): each.data() for each in seen}
    for name, content in files.items():
        publish(folder / name, content, f"{name}.tmp")


def write_if_possible(folder: Path | None, stands: Iterable[Stand], seen: Iterable[Seen]) -> None:
    """Write what `write_files` does if there is a folder: one that cannot be written is no reason to end the job."""
    if folder is not None:
        with contextlib.suppress(OSError):
            write_files(folder, stands, seen)


class Seen:
    """A rank of this machine whose recorder is open here: its ring can be read after its process has ended."""

    def __init__(self, pid: int, descriptor: int, ring: Ring) -> None:
        self.pid = pid
        self._file = descriptor
        self._ring = ring

    def data(self) -> bytes:
        return os.pread(self._file, RING_BYTES, 0)

    def has_joined(self) -> bool:
        return has_joined(self._file)

    def ring(self) -> Ring:
        self._ring = read_ring(self.data()) or self._ring
        return self._ring

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Ask for its stacks; in the body no other process does."""
        self._lock()
        try:
            with contextlib.suppress(OSError):  # it will not answer
                os.ftruncate(self._file, RING_BYTES)
                ask_for_stacks(self._file)
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> None:
        until = time.monotonic() + _STACKS_LOCK_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(_STACKS_POLL_SECONDS)

    def has_answered(self) -> bool:
        """Whether its recorder's thread has written the stacks that were asked for."""
        return has_answered(self._file)

    def lack(self, turns: Turns, since: float) -> str:
        """Whether it has lacked a processor ``since`` then, in words. Not asked of the ring alone: both a busy
        processor and native code keep the recorder's thread from its lock."""
        return lacks_processor(turns, turns_of(self.pid), self.ring().helper, time.monotonic() - since)

    def take_back(self) -> None:
        """Take the question for stacks back: the recorder's thread is not to write at the same time as a handler."""
        ask_for_stacks(self._file, not_any_more=True)

    def text(self) -> str:
        """The stacks that it has written so far."""
        return os.pread(self._file, _MOST_TEXT_BYTES, RING_BYTES).decode(errors="replace")

    def signal(self, *, main: bool = False) -> bool:
        """Make ``faulthandler`` write the stacks: on the recorder's thread, wherever the others are, or on the main
        one, before it takes another step. False if it has no such handler yet: the signal would end it."""
        helper = self.ring().helper
        try:
            if not helper or not _signals_caught(self.pid) >> (STACKS_SIGNAL - 1) & 1:
                return False
            return bool(_libc.syscall(_TGKILL, self.pid, self.pid if main else helper, STACKS_SIGNAL) == 0)
        except (OSError, ValueError):
            return False


def ranks_here(among: Callable[[int], bool] = lambda _: True) -> list[Seen]:
    """The ranks of this machine whose process ``among`` accepts, and is this user's. Close them."""
    seen: list[Seen] = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and among(int(entry)):
            seen += _opened(int(entry))
    return seen


def _opened(pid: int) -> Iterator[Seen]:
    own = os.geteuid()
    with contextlib.suppress(OSError):
        # Root may look at every process, and another user's may pose as a rank.
        if set(_status(pid, "Uid").split()) != {str(own)}:
            return
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            if not os.readlink(path).startswith(f"/memfd:{FILE_NAME} "):
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            ring = read_ring(os.pread(descriptor, RING_BYTES, 0)) if os.fstat(descriptor).st_uid == own else None
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
    return not ProcessState.of(pid).has_ended


def one_of_each(seen: Iterable[Seen]) -> list[Seen]:
    """One process for each rank: the one that has joined, not a child that has imported the package as well. Closes the
    others."""
    chosen: dict[int, Seen] = {}
    for each in sorted(seen, key=lambda each: (not each.has_joined(), each.pid)):
        if chosen.setdefault(each.ring().rank, each) is not each:
            each.close()
    return [chosen[rank] for rank in sorted(chosen)]


def look(seen: Sequence[Seen], *, resume: bool = False, native: bool = False) -> list[Stand]:
    """Find out where these ranks stand; takes a second or two where one does not answer.

    ``resume``: a rank that is stopped goes on (SIGCONT) and can answer: it is going to be ended anyway. ``native``:
    with C++ frames, by py-spy, where that is installed.
    """
    with contextlib.ExitStack() as asked:
        before = {each.pid: ProcessState.of(each.pid) for each in seen}
        alive = [each for each in seen if not before[each.pid].has_ended]
        for each in alive:
            asked.enter_context(each.asked())
        silent = [each for each in alive if not before[each.pid].is_stopped]
        since, turns = time.monotonic(), {each.pid: turns_of(each.pid) for each in silent}
        silent = _await(silent, Seen.has_answered, _STACKS_ANSWER_SECONDS)
        kept = {each.pid: each.lack(turns[each.pid], since) for each in silent}
        for each in alive:
            if resume and before[each.pid].is_stopped:
                each.take_back()
                each.signal(main=True)  # it waits there
                with contextlib.suppress(OSError):
                    os.kill(each.pid, signal.SIGCONT)
                silent.append(each)
        silent = [each for each in silent if each.pid not in kept or each.signal()]
        _await(silent, _is_whole(), _STACKS_SIGNAL_SECONDS)
        return [_stand(each, before[each.pid], kept.get(each.pid), native) for each in seen]


def looked_at(seen: Sequence[Seen]) -> list[tuple[Ring, ProcessState]]:
    """What `top` shows of these ranks; takes a moment longer where one is silent, and may lack a processor."""
    looked = [(each, each.ring(), ProcessState.of(each.pid)) for each in seen]
    since = time.monotonic()
    turns = {each.pid: turns_of(each.pid) for each, ring, process in looked if is_silent(ring, process)}
    if turns:
        time.sleep(_TOP_TURNS_SECONDS)
    return [
        (ring, replace(process, lacks_processor=each.lack(turns[each.pid], since)) if each.pid in turns else process)
        for each, ring, process in looked
    ]


def _await(seen: Iterable[Seen], is_done: Callable[[Seen], bool], seconds: float) -> list[Seen]:
    """Wait until all ranks are done; returns those that were not done in time."""
    until, waiting = time.monotonic() + seconds, list(seen)
    while waiting and time.monotonic() < until:
        time.sleep(_STACKS_POLL_SECONDS)
        waiting = [each for each in waiting if not is_done(each)]
    return waiting


def _is_whole() -> Callable[[Seen], bool]:
    """Whether a handler has written the main thread's stack, the last one, to its outermost frame, or no more since."""
    sizes: dict[int, tuple[int, float]] = {}

    def is_whole(each: Seen) -> bool:
        text, now = each.text(), time.monotonic()
        if sizes.get(each.pid, (-1, now))[0] != len(text):
            sizes[each.pid] = len(text), now
        threads = parse(text, each.ring().main_ident)
        frames = next((thread.frames for thread in threads if thread.is_main), ())
        is_outermost = bool(frames) and frames[-1].function in _OUTERMOST and text.endswith("\n")
        return is_outermost or (bool(frames) and now - sizes[each.pid][1] >= _STACKS_QUIET_SECONDS)

    return is_whole


def _stand(each: Seen, before: ProcessState, lack: str | None, native: bool) -> Stand:
    """The stand of a rank. ``lack``: None if it has answered; else whether it lacked a processor, in words."""
    ring, now = each.ring(), replace(ProcessState.of(each.pid), lacks_processor=lack or "")
    threads = parse(each.text(), ring.main_ident) if not before.has_ended else ()
    what = "" if ring.doing is None else ring.doing.words
    state = before.words(now, keeps_lock=lack is not None)
    waits = ring.waits and not before.is_kept(now)
    return Stand(ring.rank, each.pid, ring.step, what, waits, state, threads, _native(each.pid) if native else "")


def _signals_caught(pid: int) -> int:
    """The signals that a process has a handler of, a bit for each."""
    return int(_status(pid, "SigCgt") or "0", 16)


def _status(pid: int, field: str) -> str:
    """The text of a process's ``/proc/<pid>/status``. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return next((line.partition(":")[2] for line in lines if line.startswith(f"{field}:")), "")


def _native(pid: int) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["py-spy", "dump", "--native", "--nonblocking", "--pid", str(pid)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_STACKS_NATIVE_SECONDS)
        return ended.stdout.strip() if ended.returncode == 0 else ""
    return ""
