"""Batches of images decoded by worker processes: the same numbers as without them, faster.

`WorkerLoader` cuts batches into tasks of a few images, `WorkerPool` starts the workers, feeds them evenly, and replaces
those that die or hang. What a lost worker had begun is decoded again by its replacement: an image follows from its task
alone. Workers write into memory that this process reads without a copy (`SlotPool`).

Neither multiprocessing's pools nor its shared memory: a pool ends with its first lost worker, its processes are forks
or import the user's script again, and memory with a name in /dev/shm outlives a killed process and fills the 64 MB of a
container.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_train.data.datasets import Arrays, Indices
from fleet_train.data.images import CorruptImages, ImageFolder
from fleet_train.data.loader import Loader, Prefetcher
from fleet_train.data.sampler import BatchSampler
from fleet_train.errors import DataError, DataWorkersLost, printable

_DECODE_TASK_SECONDS = 120.0
"""How long one task (a few images) may take before its worker counts as hanging: a network file system may pause."""
_WORKERS_REPLACED_SECONDS = 3600.0
"""How long a replaced worker counts: too many within this time end the training."""
_WORKERS_POLL_SECONDS = 0.5
"""How long a loader waits for an answer before it looks for silent workers and for the end of its epoch."""
_WORKERS_DRAIN_SECONDS = 3.0
"""How long an epoch that is left may wait for the tasks that workers have begun, so that they can be kept."""
_WORKER_END_SECONDS = 5.0
"""How long a worker whose socket is closed may take to end, and a killed one to be gone."""
_WORKER_CLOSE_SECONDS = 2.0
"""How long a whole pool of workers that is closed may take to end: a user waits for it."""

_log = logging.getLogger(__name__)
_PROGRAM = "fleet_train.data.decode_worker"
# Ctrl-C goes only to the trainer, even before a worker ignores it. A separate session would also do that, but Linux
# divides processor time by session (autogroup): workers would get more of it than the trainer.
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
MAX_MESSAGE_BYTES = 1 << 20
MOST_REPLACED = 10
"""How many workers of a pool may be replaced within an hour."""
# A second task is queued at the worker while it is busy with the first. More would only delay the end of an epoch.
TASKS_PER_WORKER = 2
# Small enough to divide a batch evenly, large enough to make the cost of messages negligible.
_IMAGES_PER_TASK = 8
_NAMES_SHOWN = 3
_SILENT = "is the disk or network file system unavailable?"


class WorkerLoader(Loader):
    """One rank's batches of an image folder, decoded by `workers` processes.

    Batches are in shared memory that is reused as soon as the array is released. The workers start with the first epoch
    and stay for the next ones; `close` ends them (so does any end of this process). With `keep_workers=False` they end
    with each epoch, for a loader that is rarely used.
    """

    def __init__(
        self,
        dataset: ImageFolder,
        sampler: BatchSampler,
        augment: str = "crop_flip",
        workers: int = 2,
        prefetch_depth: int = 2,
        *,
        keep_workers: bool = True,
        task_seconds: float = _DECODE_TASK_SECONDS,
    ) -> None:
        super().__init__(dataset, sampler)
        self.images = dataset
        self.workers = workers
        self.corrupt: CorruptImages = dataset.corrupt_images()
        self._augment = augment
        self._prefetch_depth = prefetch_depth
        self._keep_workers = keep_workers
        self._task_seconds = task_seconds
        self._pool: WorkerPool | None = None
        self._slots = SlotPool()
        self._batch_of: dict[int, _Batch] = {}
        self._open: Prefetcher[Arrays] | None = None

    def epoch(self, epoch: int, consumed_samples: int = 0) -> Prefetcher[Arrays]:
        """The rest of that epoch after `consumed_samples`; use it in a `with` statement. Closes the previous epoch."""
        if self._open is not None:
            self._open.close()
        self.sampler.set_epoch(epoch, consumed_samples)
        leaving = threading.Event()
        self._open = Prefetcher(self._batches(leaving), self._prefetch_depth, leaving)
        return self._open

    def close(self) -> None:
        """End the current epoch and the workers. A later epoch starts new ones."""
        if self._open is not None:
            self._open.close()
        self._end_workers()

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._slots.close()
            self._pool, self._slots = None, SlotPool()

    def _batches(self, leaving: threading.Event) -> Iterator[Arrays]:
        pool = self._pool = self._pool or self._start()
        usable = False
        try:
            with contextlib.suppress(GeneratorExit):
                yield from self._decoded(pool, leaving)
            usable = pool.drain()
        finally:
            for batch in self._batch_of.values():
                self._slots.give_back(batch.slot)
            self._batch_of.clear()
            if not (usable and self._keep_workers):
                self._end_workers()

    def _decoded(self, pool: WorkerPool, leaving: threading.Event) -> Iterator[Arrays]:
        """The batches in order; enough are begun to keep all workers busy."""
        begun: deque[_Batch] = deque()
        steps, next_step = len(self), 0
        begun_at_once = max(self._prefetch_depth, batches_ahead(self.workers, len(self.indices(0)))) if steps else 0
        while next_step < steps or begun:
            while next_step < steps and len(begun) < begun_at_once:
                begun.append(self._begin(pool, self.indices(next_step)))
                next_step += 1
            while begun[0].missing:
                for task in pool.done():
                    self._record(pool, task)
                if leaving.is_set():
                    return
            yield self._feed(begun.popleft())

    def _start(self) -> WorkerPool:
        hello = {"settings": asdict(self.images.settings), "augment": self._augment, "seed": self.sampler.seed}
        return WorkerPool(self.workers, hello, self._task_seconds)

    def _begin(self, pool: WorkerPool, indices: Indices) -> _Batch:
        indices = np.array([self.corrupt.skip(index) for index in indices.tolist()], np.int64)
        slot = self._slots.take(4 * len(indices) * int(np.prod(self.images.sample_shape)))
        batch = self._batch_of[slot.number] = _Batch(slot, indices, len(indices))
        for row in range(0, len(indices), _IMAGES_PER_TASK):
            pool.add(self._task(batch, row, indices[row : row + _IMAGES_PER_TASK].tolist()))
        return batch

    def _task(self, batch: _Batch, row: int, indices: list[int]) -> Task:
        images = [(self.images.path(index), index) for index in indices]
        return Task(batch.slot, row, self.sampler.epoch, images)

    def _record(self, pool: WorkerPool, task: Task) -> None:
        """Count decoded images; queue replacements for unreadable ones."""
        batch = self._batch_of[task.slot.number]
        batch.missing -= len(task.images) - len(task.failed)
        for place, reason in task.failed:
            index = task.images[place][1]
            row = task.row + place
            batch.indices[row] = self.corrupt.replacement(index, self.images.paths[index], reason)
            pool.add(self._task(batch, row, [int(batch.indices[row])]), first=True)

    def _feed(self, batch: _Batch) -> Arrays:
        del self._batch_of[batch.slot.number]
        features = self._slots.lend(batch.slot, (len(batch.indices), *self.images.sample_shape))
        feed: Arrays = {"features": features, "labels": self.images.labels[batch.indices]}
        return feed


def batches_ahead(workers: int, batch_size: int) -> int:
    """Number of concurrent batches: their tasks keep all workers busy while the first of them is completed."""
    tasks_per_batch = -(-batch_size // _IMAGES_PER_TASK)
    return 1 + -(-workers * TASKS_PER_WORKER // tasks_per_batch)


@dataclass
class _Batch:
    """A batch that is being decoded."""

    slot: Slot
    indices: Indices
    """Dataset indices, with replacements for unreadable images."""
    missing: int
    """Rows not decoded yet."""


# Messages are JSON, one per packet of a socket:
#   {"settings": {...}, "augment": "crop_flip", "seed": 0}   to the worker, first and once
#   {"slot": 0, "bytes": 9633792}                            with a descriptor: a new piece of memory
#   {"task": 7, "slot": 0, "row": 16, "epoch": 2, "images": [[path, index], ...]}
#   {"task": 7, "failed": [[3, "OSError: ..."]]}             the answer: rows of the task, with reasons


def send(connection: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """Send one message, with a file descriptor if one is given."""
    data = [json.dumps(message).encode()]
    if descriptor is None:
        connection.sendmsg(data)
    else:
        socket.send_fds(connection, data, [descriptor])


@dataclass
class Task:
    """Images for consecutive rows of a slot."""

    slot: Slot
    row: int
    epoch: int
    images: list[tuple[str, int]]
    """The images: (path, dataset index) per row."""
    number: int = 0
    failed: list[tuple[int, str]] = field(default_factory=list)
    """The unreadable images: (position in `images`, reason); filled in when the task is done."""


class _Worker:
    def __init__(self, number: int, hello: dict[str, Any]) -> None:
        self.number = number
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                **_OWN_GROUP,
            )
        self.slots: set[int] = set()
        self.tasks: dict[int, Task] = {}
        self.last_answer = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead already: `done` finds out
            send(self.connection, hello)

    def give(self, task: Task) -> None:
        if not self.tasks:
            self.last_answer = time.monotonic()
        self.tasks[task.number] = task
        slot = task.slot
        if slot.number not in self.slots:
            send(self.connection, {"slot": slot.number, "bytes": slot.num_bytes}, slot.descriptor)
            self.slots.add(slot.number)
        message = {"task": task.number, "slot": slot.number, "row": task.row, "epoch": task.epoch}
        send(self.connection, {**message, "images": task.images})

    def reading(self) -> str:
        names = [path for task in self.tasks.values() for path, _ in task.images]
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return f"{', '.join(names[:_NAMES_SHOWN])}{more}"

    def end(self, grace_seconds: float) -> str | None:
        """Kill its process unless it ends within that time, and say how it ended; None if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_seconds)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_WORKER_END_SECONDS)
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return None

    def hint(self) -> str:
        """The usual cause of its end."""
        if self.process.returncode == -signal.SIGKILL:
            return "memory was probably short (fewer --workers, a smaller --batch_size)"
        return "its own message is above, or one of these files crashes the decoder"


class WorkerPool:
    """`count` processes that work on tasks in the order in which they were added. Not thread-safe.

    Args:
        hello: settings, augment and seed for the workers (see above).
        task_seconds: a worker that is silent for longer is replaced.

    Methods raise DataWorkersLost if too many workers die, or one cannot be ended.
    """

    def __init__(self, count: int, hello: dict[str, Any], task_seconds: float = _DECODE_TASK_SECONDS) -> None:
        if count < 1:
            raise DataError(f"--workers {count}: a pool needs at least 1 worker process")
        self._hello = hello
        self._task_seconds = task_seconds
        self._replaced: deque[float] = deque(maxlen=MOST_REPLACED)
        """The times at which workers were replaced, of ``time.monotonic``, in seconds."""
        self._waiting: deque[Task] = deque()
        self._next_number = 0
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        # Even without close(): at the interpreter's exit, or when the pool is dropped.
        self._finalizer = weakref.finalize(self, _end, self._workers, self._selector)
        for number in range(count):
            self._workers.append(self._start(number))

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def add(self, task: Task, first: bool = False) -> None:
        """Queue the task after those added before, or before them."""
        task.number = self._next_number
        self._next_number += 1
        (self._waiting.appendleft if first else self._waiting.append)(task)
        self._hand_out()

    def done(self) -> list[Task]:
        """Tasks finished meanwhile; waits briefly for one if there is none."""
        finished: list[Task] = []
        for key, _ in self._selector.select(timeout=min(_WORKERS_POLL_SECONDS, self._task_seconds)):
            finished += self._receive(key.data)
        self._replace_silent()
        self._hand_out()
        return finished

    def drain(self) -> bool:
        """Drop tasks that no worker has begun and wait for the rest: then no slot is being written. False if a worker
        hangs."""
        self._waiting.clear()
        deadline = time.monotonic() + _WORKERS_DRAIN_SECONDS
        while any(worker.tasks for worker in self._workers):
            if time.monotonic() > deadline:
                return False
            self.done()
        return True

    def close(self) -> None:
        """End the workers and wait for them. May be called twice."""
        self._finalizer()

    def _hand_out(self) -> None:
        while self._waiting:
            worker = min(self._workers, key=lambda candidate: len(candidate.tasks))
            if len(worker.tasks) >= TASKS_PER_WORKER:
                return
            try:
                worker.give(self._waiting.popleft())
            except (BrokenPipeError, ConnectionResetError):
                self._replace(worker)

    def _receive(self, worker: _Worker) -> list[Task]:
        try:
            data = worker.connection.recv(MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            self._replace(worker)
            return []
        answer = json.loads(data)
        worker.last_answer = time.monotonic()
        task = worker.tasks.pop(answer["task"])
        task.failed = [(place, reason) for place, reason in answer["failed"]]
        return [task]

    def _start(self, number: int) -> _Worker:
        worker = _Worker(number, self._hello)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        return worker

    def _replace_silent(self) -> None:
        for worker in self._workers[:]:
            silent = time.monotonic() - worker.last_answer
            if worker.tasks and silent > self._task_seconds:
                self._replace(worker, f"has not responded for {silent:.0f} s")

    def _replace(self, worker: _Worker, silent: str = "") -> None:
        """Start a new worker in place of one that has died, or that is silent; its tasks become the next ones.

        Its end is awaited before: until then it may write into the slots of its tasks.
        """
        self._selector.unregister(worker.connection)
        worker.connection.close()
        ended = worker.end(grace_seconds=0 if silent else _WORKER_END_SECONDS)
        what = (
            f"data worker {worker.number} of {len(self._workers)} (process {worker.process.pid}) {silent or ended} "
            f"while reading {worker.reading() or 'nothing'}"
        )
        if ended is None:
            raise DataWorkersLost(f"{what}, and cannot be killed; {_SILENT}")
        what += f"; {_SILENT if silent else worker.hint()}"
        now = time.monotonic()
        if len(self._replaced) == MOST_REPLACED and now - self._replaced[0] < _WORKERS_REPLACED_SECONDS:
            raise DataWorkersLost(
                f"{what}; {MOST_REPLACED} workers of this rank have already been replaced within "
                f"{now - self._replaced[0]:.0f} s"
            )
        self._replaced.append(now)
        _log.warning("%s; a new worker reads them", printable(what))
        self._workers[worker.number] = self._start(worker.number)
        self._waiting.extendleft(reversed(worker.tasks.values()))


def _environment() -> dict[str, str]:
    """The environment of a worker: one thread, and this same package, wherever the script was started."""
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (package_parent, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _end(workers: list[_Worker], selector: selectors.BaseSelector) -> None:
    """A closed socket ends a worker; one that is blocked on the disk is killed."""
    selector.close()
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        try:
            worker.process.wait(_WORKER_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_WORKER_CLOSE_SECONDS)


# Memory that worker processes write and this process reads without a copy.
#
# Anonymous files (memfd) instead of names in /dev/shm: nothing remains after a process ends in any way, and a
# container's 64 MB limit on /dev/shm does not apply.


class Slot:
    """One piece of shared memory."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create(f"fleet_train-batch-{number}")
        os.ftruncate(self.descriptor, num_bytes)
        self.memory = mmap.mmap(self.descriptor, num_bytes)


class SlotPool:
    """Slots that are returned automatically when the arrays over them are no longer used."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        # The garbage collector's callbacks may run on any thread: appending to a deque is atomic.
        self._free: deque[Slot] = deque()

    def take(self, num_bytes: int) -> Slot:
        """A free slot of at least that size."""
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if slot.num_bytes >= num_bytes:
                return slot
            self._free.append(slot)
        self._slots.append(Slot(len(self._slots), num_bytes))
        return self._slots[-1]

    def lend(self, slot: Slot, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The slot as an array; it is free again when the array and all views of it are gone."""
        whole = np.frombuffer(slot.memory, np.float32, int(np.prod(shape)))
        weakref.finalize(whole, self._free.append, slot).atexit = False
        return whole.reshape(shape)

    def give_back(self, slot: Slot) -> None:
        """Return a slot that was taken and not lent."""
        self._free.append(slot)

    def close(self) -> None:
        """Release all slots. Lent arrays stay valid: the memory is freed with the last of them."""
        for slot in self._slots:
            os.close(slot.descriptor)
        self._slots.clear()
        self._free.clear()
