"""The engine for backends whose calls block the host (Gloo): each communicator has a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fleet_train.collectives.engine import (
    Collective,
    Device,
    HostDevice,
    Place,
    Progress,
    Stages,
    WorkerThread,
    carry_out,
)
from fleet_train.collectives.paddle_compat import ensured_dynamic_mode
from fleet_train.errors import FleetTrainError

T = TypeVar("T")
AttributeFailure = Callable[[Place, BaseException], FleetTrainError]
# Beyond a place's timeout: Gloo's own timeout of 30 s and the search for missing ranks come first and report more.
_MARGIN_SECONDS = 60.0


class Result(Generic[T]):
    """A result with a bounded wait: a call of Gloo may block forever."""

    def __init__(self, future: Future[T], place: Place, engine: ThreadEngine) -> None:
        self._future = future
        self._place = place
        self._engine = engine

    def result(self) -> T:
        self._engine.await_while_it_moves(self._future, self._place)
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


class ThreadEngine:
    """Each communicator's thread carries out stages in the order in which all ranks start them.

    There is one thread per communicator, for any number of programs. The part of the stages before ``HAND_OVER`` runs
    on the thread that starts them. ``attribute_failure`` makes the error for a failed collective.
    """

    reads_values = True
    side_by_side = True
    barrier_margin_seconds = 0.0

    def __init__(self, device_place: Any, attribute_failure: AttributeFailure) -> None:
        self.device: Device = HostDevice()
        self._device_place = device_place
        self._attribute_failure = attribute_failure
        self._threads: list[WorkerThread] = []
        self._moved_at = 0.0

    def start(
        self, stages: Stages[T], place: Place, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> Result[T]:
        progress = Progress(stages)

        def rest() -> T:
            if barrier is not None:
                barrier.result()
                self._move()
            return self._blaming(place, progress)

        return Result(self._submit(communicator, rest), place, self)

    def run_here(self, stages: Stages[T], place: Place) -> T:
        return self._blaming(place, Progress(stages))

    def step_on(self) -> None:
        """Does nothing: the threads proceed on their own."""

    def beside(self, task: Callable[[], T]) -> Future[T]:
        """On the first communicator's thread: its collectives after a barrier must wait for the barrier anyway."""
        return self._submit(0, task)

    def stop(self) -> None:
        for thread in self._threads:
            thread.stop()

    def await_while_it_moves(self, future: Future[Any], place: Place) -> None:
        """Wait for the result. Raises the error if no collective has ended within the timeout and a margin."""
        bound, began = place.timeout_seconds + _MARGIN_SECONDS, time.monotonic()
        while not future.done():
            silence = time.monotonic() - max(began, self._moved_at)
            if silence >= bound:
                raise self._attribute_failure(place, FleetTrainError(f"no collective has ended for {silence:.0f} s"))
            _await(future, bound - silence)

    def _move(self) -> None:
        self._moved_at = time.monotonic()

    def _submit(self, communicator: int, task: Callable[[], T]) -> Future[T]:
        while len(self._threads) <= communicator:
            name = f"fleet_train communicator {len(self._threads)}"
            self._threads.append(WorkerThread(name, self._device_place))
        return self._threads[communicator].submit(task)

    def _blaming(self, place: Place, progress: Progress[T]) -> T:
        try:
            return carry_out(progress, self._move)
        except FleetTrainError:
            raise
        except Exception as error:
            raise self._attribute_failure(place, error) from error


def _await(future: Future[Any], seconds: float) -> None:
    """Wait until it is done, or for this long. (``futures.wait`` makes an event and a waiter for each call.)"""
    with contextlib.suppress(futures.TimeoutError):
        future.exception(seconds)


# The engine for backends whose calls are enqueued on a device's streams (NCCL).
#
# A call with ``sync_op=False`` enqueues the collective on its group's stream, after what is enqueued on the
# calculation stream, and returns; ``task.wait()`` makes the calculation stream, not the host, wait for it (Paddle
# 3.3.1, ``process_group_nccl.cc``). So the computing thread enqueues everything in program order, which the chain of
# tokens makes the same on every rank, and waits are placed where the results are used.


Begin = Callable[[Collective], Any]


def begin_asynchronously(collective: Collective) -> Any:
    """Enqueue a collective; returns Paddle's task, or None on a rank that is not in the group."""
    return collective.begin(sync_op=False)


@dataclass(frozen=True)
class Enqueued:
    """A collective on its group's stream."""

    group: int
    ranks: frozenset[int]
    task: Any


class InFlight(Generic[T]):
    """Stages with enqueued collectives and Paddle's tasks."""

    def __init__(self, engine: StreamEngine, stages: Stages[T], place: Place) -> None:
        self._engine = engine
        self.place = place
        self.progress = Progress(stages)
        self.tasks: list[Enqueued] = []

    @property
    def has_more(self) -> bool:
        return self.progress.stage is not None and self.progress.stage.more

    def result(self) -> T:
        return self._engine.result_of(self)


class StreamEngine:
    """Enqueues collectives from the computing thread and never reads a device value.

    Stages end at fixed places: those with ``more`` at the next ``step_on``, the last one where the result is needed.
    Two groups that share two or more ranks are never in flight at the same time: devices that run two communicators'
    kernels in different orders deadlock.
    """

    reads_values = False
    side_by_side = False
    barrier_margin_seconds = 8.0

    def __init__(
        self,
        device: Device,
        attribute_failure: AttributeFailure,
        watchdog: Watchdog,
        begin: Begin = begin_asynchronously,
    ) -> None:
        self.device = device
        self._attribute_failure = attribute_failure
        self._watchdog = watchdog
        self._begin = begin
        self._in_flight: list[InFlight[Any]] = []
        self._beside = WorkerThread("fleet_train barriers", None)

    def start(
        self, stages: Stages[T], place: Place, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> InFlight[T]:
        """``communicator`` is unused here: everything runs on the computing thread."""
        del communicator
        if barrier is not None:
            barrier.result()
        running = InFlight(self, stages, place)
        self._in_flight.append(running)
        with self._blaming(running):
            self._enqueue(running)
        return running

    def run_here(self, stages: Stages[T], place: Place) -> T:
        return self.start(stages, place).result()

    def step_on(self) -> None:
        for running in list(self._in_flight):
            if running.has_more:
                self._end_stage(running)

    def result_of(self, running: InFlight[T]) -> T:
        """Enqueue the rest of ``running``, interleaved with the rest of the others so that they overlap."""
        while not running.progress.is_done:
            if running.has_more:
                self.step_on()
            else:
                self._end_stage(running)
        return running.progress.value  # type: ignore[return-value]

    def beside(self, task: Callable[[], T]) -> Future[T]:
        return self._beside.submit(task)

    def stop(self) -> None:
        self._beside.stop()
        self._watchdog.stop()

    def _end_stage(self, running: InFlight[Any]) -> None:
        with self._blaming(running):
            for enqueued in running.tasks:
                enqueued.task.wait()
            running.tasks = []
            running.progress.go_on()
            self._enqueue(running)

    def _enqueue(self, running: InFlight[Any]) -> None:
        """Start the collectives of the current stage of ``running``. Empty stages count as well, so that a rank that
        does not take part in a stage keeps the same order as those that do."""
        progress = running.progress
        while progress.stage is not None and not progress.stage.collectives and not progress.stage.more:
            progress.go_on()
        if progress.stage is None:
            self._in_flight.remove(running)
            return
        for collective in progress.stage.collectives:
            self._begin_one(running, collective)

    def _begin_one(self, running: InFlight[Any], collective: Collective) -> None:
        group = collective.group
        for others in (enqueued for other in self._in_flight for enqueued in other.tasks):
            if others.group != group.id and len(others.ranks.intersection(group.ranks)) > 1:
                others.task.wait()
        with self._watchdog.over_a_call(running.place):
            task = self._begin(collective)
        if task is not None:
            running.tasks.append(Enqueued(group.id, frozenset(group.ranks), task))
            self._watchdog.watch(task, running.place)

    @contextmanager
    def _blaming(self, running: InFlight[Any]) -> Iterator[None]:
        """Eager mode in the body: calls may come from a script in static mode."""
        try:
            with ensured_dynamic_mode():
                yield
        except FleetTrainError:
            raise
        except Exception as error:
            raise self._attribute_failure(running.place, error) from error


# Detects collectives that do not end, while the computing thread may be in a wait that no signal interrupts.


POLL_SECONDS = 0.1
# After a collective has waited this long, ask the store. Less than half of the time for attributing a failure: a rank
# whose own timeout has not passed must learn of an attribution that another rank has started, and join it in time.
ASK_SECONDS = 2.0


class _Call:
    """A host call that may block, as a task."""

    def __init__(self) -> None:
        self.has_returned = False

    def is_completed(self) -> bool:
        return self.has_returned


class Watchdog:
    """Polls the tasks in flight on its own thread; it does not touch a device's stream.

    ``on_stuck`` is called, once and on that thread, with the oldest task's place and the seconds without progress:
    when no task has ended for ``timeout_seconds`` of that place, or earlier when ``is_hopeless``: a rank is gone, or
    another rank's watchdog has given up.
    """

    def __init__(self, on_stuck: Callable[[Place, float], None], is_hopeless: Callable[[], bool]) -> None:
        self._on_stuck = on_stuck
        self._is_hopeless = is_hopeless
        self._lock = threading.Lock()
        self._watched: list[tuple[Any, Place]] = []
        self._progressed = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, task: Any, place: Place) -> None:
        """``task``: Paddle's, with ``is_completed()``."""
        with self._lock:
            if not self._watched:
                self._progressed = time.monotonic()
            self._watched.append((task, place))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fleet_train watchdog", daemon=True)
            self._thread.start()

    @contextmanager
    def over_a_call(self, place: Place) -> Iterator[None]:
        """Watch the body: enqueueing blocks while a communicator is being created or a stream's queue is full."""
        call = _Call()
        self.watch(call, place)
        try:
            yield
        finally:
            call.has_returned = True

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        asked = time.monotonic()
        while not self._stopped.wait(POLL_SECONDS):
            oldest, silence = self._look()
            if oldest is None:
                continue
            is_over = silence >= oldest.timeout_seconds
            if not is_over and silence >= ASK_SECONDS and time.monotonic() - asked >= ASK_SECONDS:
                asked, is_over = time.monotonic(), self._ask()
            if is_over:
                self._on_stuck(oldest, silence)
                return

    def _ask(self) -> bool:
        """A store that does not answer counts as gone, with the rank that hosts it."""
        try:
            return self._is_hopeless()
        except FleetTrainError:
            return True

    def _look(self) -> tuple[Place | None, float]:
        """The place of the oldest unfinished task, and the seconds since a task last ended."""
        with self._lock:
            going_on = [(task, place) for task, place in self._watched if not task.is_completed()]
            if len(going_on) < len(self._watched):
                self._progressed = time.monotonic()
            self._watched = going_on
            return (going_on[0][1] if going_on else None), time.monotonic() - self._progressed
