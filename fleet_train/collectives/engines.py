"""Two engines: threads for backends whose calls block the host (Gloo), streams for those that enqueue them (NCCL)."""

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

from fleet_train import timeouts
from fleet_train.collectives.engine import (
    AttributeFailure,
    CallContext,
    Collective,
    Engine,
    HostDevice,
    Progress,
    Stages,
    WorkerThread,
    carry_out,
)
from fleet_train.collectives.paddle_compat import ensured_dynamic_mode
from fleet_train.errors import FleetTrainError

T = TypeVar("T")


class Result(Generic[T]):
    """A result with a bounded wait: a call of Gloo may block forever."""

    def __init__(self, future: Future[T], context: CallContext, engine: ThreadEngine) -> None:
        self._future = future
        self._context = context
        self._engine = engine

    def result(self) -> T:
        self._engine.await_while_it_moves(self._future, self._context)
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


class ThreadEngine(Engine):
    """Each communicator's thread carries out stages in the order in which all ranks start them.

    There is one thread per communicator, for any number of programs. The part of the stages before ``HAND_OVER`` runs
    on the thread that starts them.
    """

    reads_values = True
    side_by_side = True
    barrier_margin_seconds = 0.0

    def __init__(self, device_place: Any, attribute_failure: AttributeFailure) -> None:
        super().__init__(HostDevice(), attribute_failure)
        self._device_place = device_place
        self._threads: list[WorkerThread] = []
        self._moved_at = 0.0

    def start(
        self, stages: Stages[T], context: CallContext, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> Result[T]:
        progress = Progress(stages)

        def rest() -> T:
            if barrier is not None:
                barrier.result()
                self._move()
            return self._carry_out(context, progress)

        return Result(self._submit(communicator, rest), context, self)

    def run_here(self, stages: Stages[T], context: CallContext) -> T:
        return self._carry_out(context, Progress(stages))

    def run_in_background(self, task: Callable[[], T]) -> Future[T]:
        """On the first communicator's thread: its collectives after a barrier must wait for the barrier anyway."""
        return self._submit(0, task)

    def stop(self) -> None:
        for thread in self._threads:
            thread.stop()

    def await_while_it_moves(self, future: Future[Any], context: CallContext) -> None:
        """Wait for the result. Raises the error if no collective has ended within the timeout and a margin."""
        bound, began = context.timeout_seconds + timeouts.COLLECTIVE_MARGIN_SECONDS, time.monotonic()
        while not future.done():
            silence = time.monotonic() - max(began, self._moved_at)
            if silence >= bound:
                raise self._attribute_failure(context, FleetTrainError(f"no collective has ended for {silence:.0f} s"))
            _await(future, bound - silence)

    def _move(self) -> None:
        self._moved_at = time.monotonic()

    def _submit(self, communicator: int, task: Callable[[], T]) -> Future[T]:
        while len(self._threads) <= communicator:
            name = f"fleet_train communicator {len(self._threads)}"
            self._threads.append(WorkerThread(name, self._device_place))
        return self._threads[communicator].submit(task)

    def _carry_out(self, context: CallContext, progress: Progress[T]) -> T:
        with self.attributing(context):
            return carry_out(progress, self._move)


def _await(future: Future[Any], seconds: float) -> None:
    """Wait until it is done, or for this long. (``futures.wait`` makes an event and a waiter for each call.)"""
    with contextlib.suppress(futures.TimeoutError):
        future.exception(seconds)


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

    def __init__(self, engine: StreamEngine, stages: Stages[T], context: CallContext) -> None:
        self._engine = engine
        self.context = context
        self.progress = Progress(stages)
        self.tasks: list[Enqueued] = []

    @property
    def has_more(self) -> bool:
        return self.progress.stage is not None and self.progress.stage.more

    def result(self) -> T:
        return self._engine.result_of(self)


class StreamEngine(Engine):
    """Enqueues collectives from the computing thread and never reads a device value.

    A call with ``sync_op=False`` enqueues the collective on its group's stream, after what is enqueued on the
    calculation stream, and returns; ``task.wait()`` makes the calculation stream, not the host, wait for it (Paddle
    3.3.1, ``process_group_nccl.cc``). The chain of tokens makes the program's order the same on every rank.

    Stages end at fixed places: those with ``more`` at the next ``step_on``, the last one where the result is needed.
    Two groups that share two or more ranks are never in flight at the same time: devices that run two communicators'
    kernels in different orders deadlock.
    """

    reads_values = False
    side_by_side = False
    barrier_margin_seconds = timeouts.STREAM_BARRIER_MARGIN_SECONDS

    def __init__(
        self,
        device: HostDevice,
        attribute_failure: AttributeFailure,
        watchdog: Watchdog,
        begin: Begin = begin_asynchronously,
    ) -> None:
        super().__init__(device, attribute_failure)
        self._watchdog = watchdog
        self._begin = begin
        self._in_flight: list[InFlight[Any]] = []
        self._background = WorkerThread("fleet_train barriers", None)

    def start(
        self, stages: Stages[T], context: CallContext, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> InFlight[T]:
        """``communicator`` is unused here: everything runs on the computing thread."""
        del communicator
        if barrier is not None:
            barrier.result()
        running = InFlight(self, stages, context)
        self._in_flight.append(running)
        with ensured_dynamic_mode(), self.attributing(running.context):
            self._enqueue(running)
        return running

    def run_here(self, stages: Stages[T], context: CallContext) -> T:
        return self.start(stages, context).result()

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

    def run_in_background(self, task: Callable[[], T]) -> Future[T]:
        return self._background.submit(task)

    def stop(self) -> None:
        self._background.stop()
        self._watchdog.stop()

    def _end_stage(self, running: InFlight[Any]) -> None:
        with ensured_dynamic_mode(), self.attributing(running.context):
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
        with self._watchdog.over_a_call(running.context):
            task = self._begin(collective)
        if task is not None:
            running.tasks.append(Enqueued(group.id, frozenset(group.ranks), task))
            self._watchdog.watch(task, running.context)


class _Call:
    """A host call that may block, as a task."""

    def __init__(self) -> None:
        self.has_returned = False

    def is_completed(self) -> bool:
        return self.has_returned


class Watchdog:
    """Detects collectives that do not end, while the computing thread may be in a wait that no signal interrupts.

    It polls the tasks in flight on its own thread and does not touch a device's stream.

    ``on_stuck`` is called, once and on that thread, with the oldest task's context and the seconds without progress:
    when no task has ended for ``timeout_seconds`` of that context, or earlier when ``is_hopeless``: a rank is gone, or
    another rank's watchdog has given up.
    """

    def __init__(self, on_stuck: Callable[[CallContext, float], None], is_hopeless: Callable[[], bool]) -> None:
        self._on_stuck = on_stuck
        self._is_hopeless = is_hopeless
        self._lock = threading.Lock()
        self._watched: list[tuple[Any, CallContext]] = []
        self._progressed = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, task: Any, context: CallContext) -> None:
        """``task``: Paddle's, with ``is_completed()``."""
        with self._lock:
            if not self._watched:
                self._progressed = time.monotonic()
            self._watched.append((task, context))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fleet_train watchdog", daemon=True)
            self._thread.start()

    @contextmanager
    def over_a_call(self, context: CallContext) -> Iterator[None]:
        """Watch the body: enqueueing blocks while a communicator is being created or a stream's queue is full."""
        call = _Call()
        self.watch(call, context)
        try:
            yield
        finally:
            call.has_returned = True

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=timeouts.THREAD_END_SECONDS)

    def _run(self) -> None:
        asked = time.monotonic()
        while not self._stopped.wait(timeouts.WATCHDOG_POLL_SECONDS):
            oldest, silence = self._oldest()
            if oldest is None:
                continue
            is_over = silence >= oldest.timeout_seconds
            if not is_over and min(silence, time.monotonic() - asked) >= timeouts.WATCHDOG_ASK_SECONDS:
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

    def _oldest(self) -> tuple[CallContext | None, float]:
        """The context of the oldest unfinished task, and the seconds since a task last ended."""
        with self._lock:
            going_on = [(task, context) for task, context in self._watched if not task.is_completed()]
            if len(going_on) < len(self._watched):
                self._progressed = time.monotonic()
            self._watched = going_on
            return (going_on[0][1] if going_on else None), time.monotonic() - self._progressed
