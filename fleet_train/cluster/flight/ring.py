"""The flight recorder: the last events of this rank, in memory that other processes of its machine can read.

Always on. An event is two writes of some bytes into a ring, on the thread in which it happens; no lock, no message.
The ring is an anonymous file (``memfd_create``): whoever may read this process's files reads it without this process's
help (`witness`): while Python's lock is held, the process is stopped, or it sleeps in the kernel.

The stacks of all threads are written behind the ring, on request, by a thread of the recorder. If that thread does not
get Python's lock, a signal makes Python's ``faulthandler`` write them, which needs no lock.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap

from fleet_train.cluster.cluster import is_number
from fleet_train.errors import printable_line

_RECORDER_POLL_SECONDS = 0.25
"""Pause between two looks of the recorder's thread: as long as a question for stacks may wait, and as old as a
heartbeat is at most."""

FILE_NAME = "fleet_train rank"
"""The name of the anonymous file with the events, as ``/proc/<pid>/fd`` shows it."""
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""The signal that asks for stacks, a real-time one: scripts use SIGUSR1 and SIGUSR2."""
EVENTS = 2048
KINDS = (
    *("run", "barrier", "copy", "code", "wire", "wait", "call"),
    *("loader", "save", "evaluate", "backward"),
)
"""What an event is. ``run``: of a program; ``wire``: a collective; ``code``: packing and unpacking of a bucket;
``wait``: the executor waits for a bucket; ``call``: a call of the facade that waits for other ranks."""
_WAITS = ("wait", "barrier", "wire")
_INNERMOST = ("run", "loader", "evaluate", "call", "save", "copy", "code", *_WAITS)
_MAGIC = b"fleetfr1"
# Process, rank, ranks, native id of the recorder's thread; identity of the main thread; the job.
_WHO = struct.Struct("<8sIiiIQQ")
_RANK, _RANK_AT = struct.Struct("<ii"), 12
_HELPER_AT = 20
_JOB, _JOB_AT = struct.Struct("<Q"), 32
# The heartbeat; this machine's clock minus the job's, and its error.
_CLOCK = struct.Struct("<ddd")
_COUNT = struct.Struct("<I")
_ASKED = struct.Struct("<II")
_EVENT = struct.Struct("<dddqIIHHHH")
_TIME, _STEP = struct.Struct("<d"), 4
_STEPS = struct.Struct("<II")
_EVENT_BYTES, _pack_event, _pack_time = _EVENT.size, _EVENT.pack_into, _TIME.pack_into
_CLOCK_AT, _ASKED_AT, _STEPS_AT, _ENDPOINT_AT, _NAMES_AT, _EVENTS_AT = 64, 128, 136, 144, 256, 32768
_ENDED_AT = _EVENTS_AT + 16  # behind the first two times
RING_BYTES = _EVENTS_AT + EVENTS * _EVENT_BYTES
_MOST_NAME = 120
# What no recorder writes, or only while it is read: seconds since a machine's start, and ranks of a job.
_MOST_SECONDS, _MOST_RANKS = 1e10, 1 << 20
_SHORTEST_SECONDS = 50e-6


@dataclass(frozen=True)
class Event:
    """An event of a rank. Times are of CLOCK_MONOTONIC (``time.perf_counter``), in seconds; ``ended``: 0 until then."""

    kind: str
    name: str
    group: str
    step: int
    nbytes: int
    enqueued: float
    began: float
    ended: float
    thread: int
    """The thread's native id, as in ``/proc/<pid>/task``."""

    @property
    def words(self) -> str:
        """The event in words, such as ``barrier`` or ``wire bucket 2``."""
        return f"{self.kind} {self.name}".rstrip()


@dataclass(frozen=True)
class Ring:
    """A copy of a rank's ring: who it is, and its events in the order in which they were enqueued."""

    pid: int
    rank: int
    """The rank's number; -1 until it is known."""
    world_size: int
    helper: int
    main_ident: int
    job: int
    heartbeat: float
    clock_offset: float
    clock_error: float
    endpoint: str
    """The rank's endpoint; empty until it is known."""
    traced: tuple[int, int]
    """First and last step of what `merged` has made; (0, 0): it is no trace."""
    events: tuple[Event, ...]

    @property
    def doing(self) -> Event | None:
        """The innermost event that has not ended."""
        open_ones = [event for event in self.events if not event.ended and event.kind in _INNERMOST]
        return max(open_ones, key=lambda event: _INNERMOST.index(event.kind), default=None)

    @property
    def waits(self) -> bool:
        """Whether the innermost event that has not ended is a wait for other ranks."""
        return self.doing is not None and self.doing.kind in _WAITS

    @property
    def has_joined(self) -> bool:
        return self.job != 0

    @property
    def step(self) -> int:
        return max((event.step for event in self.events), default=0)


def read_ring(data: bytes) -> Ring | None:
    """The ring in a file's first `RING_BYTES`, or what `merged` has made; None if it is something else.

    Others may have written it: of a clock or a rank that cannot be it is none, events that cannot be are left out, and
    names have no control characters.
    """
    if len(data) < _EVENTS_AT or data[: len(_MAGIC)] != _MAGIC:
        return None
    _, pid, rank, world_size, helper, main_ident, job = _WHO.unpack_from(data)
    heartbeat, offset, error = _CLOCK.unpack_from(data, _CLOCK_AT)
    if not (0 <= heartbeat < _MOST_SECONDS and abs(offset) < _MOST_SECONDS and 0 <= error < _MOST_SECONDS):
        return None
    if not (-1 <= rank < _MOST_RANKS and 0 <= world_size <= _MOST_RANKS):
        return None
    names = [_text(name) for name in data[_NAMES_AT:_EVENTS_AT].split(b"\0")]
    events = [event for record in _records(data) if (event := _read_event(record, names)) is not None]
    events.sort(key=lambda event: event.enqueued)
    endpoint = _text(data[_ENDPOINT_AT:_NAMES_AT].partition(b"\0")[0])
    traced = _STEPS.unpack_from(data, _STEPS_AT)
    clock = heartbeat, offset, error
    return Ring(pid, rank, world_size, helper, main_ident, job, *clock, endpoint, traced, tuple(events))


def _read_event(record: bytes, names: Sequence[str]) -> Event | None:
    enqueued, began, ended, nbytes, step, thread, kind, name, group, _ = _EVENT.unpack(record)
    times_can_be = 0 < enqueued < _MOST_SECONDS and 0 < began < _MOST_SECONDS
    if not times_can_be or not (ended == 0 or began <= ended < _MOST_SECONDS):
        return None
    if nbytes < 0 or kind >= len(KINDS) or max(name, group) >= len(names):
        return None
    return Event(KINDS[kind], names[name], names[group], step, nbytes, enqueued, began, ended, thread)


def _text(written: bytes) -> str:
    return printable_line(written[:_MOST_NAME].decode(errors="replace"))


def merged(copies: Sequence[bytes], first: int, last: int) -> bytes:
    """Copies of one ring as a longer one of these steps: the last one's header, and each event once, as the last copy
    with it has it."""
    # What shows where the first step begins, the run that ended the step before, began in the one before that.
    steps, events = range(first - 2, last + 1), {}
    for record in (record for copy in copies for record in _records(copy)):
        if _EVENT.unpack(record)[_STEP] in steps:
            events[record[:16] + record[24:]] = record
    header = bytearray(copies[-1][:_EVENTS_AT])
    _STEPS.pack_into(header, _STEPS_AT, first, last)
    return bytes(header) + b"".join(events.values())


def _records(data: bytes) -> Iterator[bytes]:
    for at in range(_EVENTS_AT, len(data) - _EVENT_BYTES + 1, _EVENT_BYTES):
        yield data[at : at + _EVENT_BYTES]


def ask_for_stacks(file: int, *, not_any_more: bool = False) -> None:
    """Ask the process whose file this is for the stacks of its threads, which appear behind the ring, or take that
    back. Raises OSError.

    ``file``: opened anew, since writes to that process's own descriptor go to its end. Not mapped: a process that cuts
    its file off would end this one with SIGBUS.
    """
    asked, answered = _ASKED.unpack(os.pread(file, _ASKED.size, _ASKED_AT).ljust(_ASKED.size, b"\0"))
    os.pwrite(file, _COUNT.pack(answered if not_any_more else (asked + 1) & 0xFFFFFFFF), _ASKED_AT)


def has_joined(file: int) -> bool:
    """Whether the process whose file this is has joined a job; `Ring` has all the rest."""
    return any(os.pread(file, _JOB.size, _JOB_AT))


def has_answered(file: int) -> bool:
    """Whether all stacks that were asked for are there."""
    written = os.pread(file, _ASKED.size, _ASKED_AT)
    return len(written) == _ASKED.size and written[: _COUNT.size] == written[_COUNT.size :]


class Ending:
    """Ends an event. (``contextlib.contextmanager`` doubles the time that an event takes.)"""

    __slots__ = ("_number", "_of")

    def __init__(self, of: Recorder, number: int) -> None:
        self._of, self._number = of, number

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._of.end(self._number)


class Recorder:
    """Records the events of this process. Before `start`, and in a process that is no rank, it does nothing."""

    def __init__(self) -> None:
        self.step = 0
        """The update under way, for the events that begin from now on; 0 before the first."""
        self.shortest_seconds = _SHORTEST_SECONDS
        """The length in seconds below which `add` leaves events out; a trace has all."""
        self._map: mmap | None = None
        self._file = -1
        self._count = itertools.count()
        self._newest = 0
        self._names: dict[str, int] = {"": 0}
        self._names_end = _NAMES_AT + 1
        self._naming = threading.Lock()
        self._thread = threading.local()

    @property
    def is_on(self) -> bool:
        return self._map is not None

    @property
    def helper(self) -> int:
        """The native id of the thread that writes stacks; 0 until that can be asked."""
        return 0 if self._map is None else int(_COUNT.unpack_from(self._map, _HELPER_AT)[0])

    def start(self, rank: int, world_size: int) -> None:
        """Begin to record; the second time it does nothing, nor where the kernel has no such files. ``rank``: -1 if it
        is not known yet."""
        if self._map is not None:
            return
        try:
            self._file = os.memfd_create(FILE_NAME)
            os.ftruncate(self._file, RING_BYTES)
            self._map = mmap(self._file, RING_BYTES)
        except OSError:
            return
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_APPEND)
        main = threading.main_thread().ident or 0
        _WHO.pack_into(self._map, 0, _MAGIC, os.getpid(), rank, world_size, 0, main, 0)
        threading.Thread(target=self._answer, args=(self._map,), name="fleet_train recorder", daemon=True).start()
        os.register_at_fork(after_in_child=self._forget)

    def join(self, rank: int, world_size: int, job: int, endpoint: str) -> None:
        """Note that this process is a rank of a job, which all processes of its machine know by this number (not 0)."""
        self.start(rank, world_size)
        if self._map is not None:
            written = endpoint.encode(errors="replace")[: _NAMES_AT - _ENDPOINT_AT]
            self._map[_ENDPOINT_AT : _ENDPOINT_AT + len(written)] = written
            _RANK.pack_into(self._map, _RANK_AT, rank, world_size)
            _JOB.pack_into(self._map, _JOB_AT, job)

    def set_clock(self, offset: float, error: float) -> None:
        """Note this machine's ``time.perf_counter`` minus the job's clock, and how wrong that may be; in seconds."""
        if self._map is not None:
            _CLOCK.pack_into(self._map, _CLOCK_AT, time.perf_counter(), offset, error)

    def begin(
        self, kind: str, name: str = "", nbytes: int = 0, group: str = "", enqueued: float = 0.0, began: float = 0.0
    ) -> int:
        """Begin an event, now or when it began; returns what `end` takes. Names beyond the room for them are empty."""
        ring = self._map
        if ring is None:
            return -1
        number = self._newest = next(self._count)
        began = began or time.perf_counter()
        try:
            named, grouped = self._names[name], self._names[group]
        except KeyError:
            named, grouped = self._number_of(name), self._number_of(group)
        try:
            thread = self._thread.native_id
        except AttributeError:  # the kernel is asked once: within a step that takes longer than all else here
            thread = self._thread.native_id = threading.get_native_id()
        _pack_event(
            ring,
            _EVENTS_AT + number % EVENTS * _EVENT_BYTES,
            enqueued or began,
            began,
            0.0,
            nbytes,
            self.step,
            thread,
            _KIND_OF[kind],
            named,
            grouped,
            0,
        )
        return number

    def add(self, kind: str, name: str, began: float, *, is_worth_it: bool = False) -> None:
        """Record an event that began at this ``time.perf_counter`` and ends now. Short ones are not worth their time,
        but where they show that a step has ended."""
        if self._map is not None and (is_worth_it or time.perf_counter() - began >= self.shortest_seconds):
            self.end(self.begin(kind, name, began=began))

    def end(self, number: int) -> None:
        """End an event now; nothing is written if newer events have taken its place."""
        ring = self._map
        if ring is not None and 0 <= number > self._newest - EVENTS:
            _pack_time(ring, _ENDED_AT + number % EVENTS * _EVENT_BYTES, time.perf_counter())

    def event(self, kind: str, name: str = "", nbytes: int = 0, group: str = "") -> Ending:
        """A context for ``with``: the event begins now, and ends with the body."""
        return Ending(self, self.begin(kind, name, nbytes, group))

    def copy(self) -> bytes:
        """The ring as it is now; empty in a process that is no rank."""
        return b"" if self._map is None else self._map[:RING_BYTES]

    def _number_of(self, name: str) -> int:
        if not name:
            return 0
        assert self._map is not None
        written = name.encode(errors="replace").replace(b"\0", b" ")[:_MOST_NAME] + b"\0"
        with self._naming:
            if name not in self._names:
                end = self._names_end + len(written)
                if end >= _EVENTS_AT:
                    return 0
                self._map[self._names_end : end] = written
                self._names_end = end
                self._names[name] = len(self._names)
            return self._names[name]

    def _answer(self, ring: mmap) -> None:
        """The recorder's thread: shows that Python's lock can be had, and writes stacks when it is asked to."""
        import faulthandler  # this process has other things to load first

        faulthandler.register(STACKS_SIGNAL, self._file, all_threads=True, chain=False)
        _COUNT.pack_into(ring, _HELPER_AT, threading.get_native_id())
        while True:
            _TIME.pack_into(ring, _CLOCK_AT, time.perf_counter())
            asked, answered = _ASKED.unpack_from(ring, _ASKED_AT)
            if asked != answered:
                names = (f"# {thread.ident:#x} {thread.name}\n" for thread in threading.enumerate())
                os.write(self._file, "".join(names).encode(errors="replace"))
                faulthandler.dump_traceback(self._file, all_threads=True)
                _COUNT.pack_into(ring, _ASKED_AT + _COUNT.size, asked)
            time.sleep(_RECORDER_POLL_SECONDS)

    def _forget(self) -> None:
        """Close the recorder in a forked child, which has no place in the job."""
        if self._map is not None:
            self._map, self._thread = None, threading.local()
            with suppress(OSError):
                os.close(self._file)


_KIND_OF = {kind: number for number, kind in enumerate(KINDS)}

recorder = Recorder()
"""The flight recorder of this process."""

_RANK_VARIABLES = ("PADDLE_TRAINER_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")


def start_under_a_launcher() -> None:
    """Begin to record when fleet_train is imported in a process that a launcher has started: it may hang before
    ``fleet.init``. Not in our own helpers, which inherit the environment of a rank."""
    is_ours = re.search(r" -m fleet_train(\.| (?!train\b))", " ".join(sys.orig_argv))
    rank = next((os.environ[name] for name in _RANK_VARIABLES if is_number(os.environ.get(name, ""))), None)
    if rank is not None and is_ours is None:
        recorder.start(int(rank), 0)
