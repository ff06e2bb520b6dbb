"""Two engines: threads for backends whose calls block the host (Gloo), streams for those that enqueue them (NCCL)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fleet_train import timeouts
from fleet_train.cluster.flight.ring import recorder
from fleet_train.collectives.engine import (
    AttributeFailure,
    CallContext,
    Collective,
    Engine,
    HostDevice,
    Moment,
    StageProgress,
    Stages,
    WorkerThread,
    begin_wire,
)
from fleet_train.collectives.paddle_compat import ensured_dynamic_mode
from fleet_train.errors import FleetTrainError, ProfileError
from fleet_train.log import logger

_STREAM_BARRIER_MARGIN_SECONDS = 8.0
"""How much longer than its timeout a step barrier on streams waits: watchdogs and the attribution come first."""

T = TypeVar("T")


_AT_ONCE = 8
"""Collectives of one stage that run at the same time."""


class EngineResult(Generic[T]):
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
    averages = False
    barrier_margin_seconds = 0.0

    def __init__(self, device_place: Any, attribute_failure: AttributeFailure) -> None:
        super().__init__(HostDevice(), attribute_failure)
        self._device_place = device_place
        self._threads: dict[int, WorkerThread] = {}
        self._helpers: dict[int, list[WorkerThread]] = {}
        self._moved_at = 0.0

    def start(
        self, stages: Stages[T], context: CallContext, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> EngineResult[T]:
        progress = StageProgress(stages, context)

        def rest() -> T:
            if barrier is not None:
                barrier.result()
                self._move()
            return self._carry_out(context, progress)

        return EngineResult(self._submit(communicator, rest), context, self)

    def run_here(self, stages: Stages[T], context: CallContext) -> T:
        return self._carry_out(context, StageProgress(stages, context))

    def run_in_background(self, task: Callable[[], T]) -> Future[T]:
        """Run a task on the first communicator's thread: its collectives after a barrier must wait for that anyway."""
        return self._submit(0, task)

    def stop(self) -> None:
        for thread in (*self._threads.values(), *(helper for each in self._helpers.values() for helper in each)):
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
        if communicator not in self._threads:
            self._threads[communicator] = WorkerThread(f"fleet_train communicator {communicator}", self._device_place)
        return self._threads[communicator].submit(task)

    def _carry_out(self, context: CallContext, progress: StageProgress[T]) -> T:
        while progress.stage is not None:
            collectives = progress.stage.collectives
            if len({collective.group.id for collective in collectives}) == len(collectives) > 1:
                self._carry_out_at_once(collectives, context, progress.ready_at)
            else:
                for collective in collectives:
                    self._call(collective, context, progress.ready_at)
            progress.go_on()
        return progress.value  # type: ignore[return-value]

    def _call(self, collective: Collective, context: CallContext, ready_at: float) -> None:
        event = begin_wire(collective, context, ready_at)
        with self.attributing(context):
            collective.begin(sync_op=True)
        recorder.end(event)
        self._move()

    def _carry_out_at_once(self, collectives: Sequence[Collective], context: CallContext, ready_at: float) -> None:
        """Carry out the collectives of a stage over different groups, on threads that only the calling one uses: its
        stages follow one another, and each thread takes them in their order, so that no two ranks wait for each
        other."""
        helpers = self._helpers.setdefault(threading.get_ident(), [])
        while len(helpers) < min(len(collectives), _AT_ONCE):
            name = f"{threading.current_thread().name}, {len(helpers)}"
            helpers.append(WorkerThread(name, self._device_place))
        calls = [
            helpers[number % len(helpers)].submit(partial(self._call, collective, context, ready_at))
            for number, collective in enumerate(collectives)
        ]
        futures.wait(calls, return_when=futures.FIRST_EXCEPTION)
        for call in calls:
            if call.done():
                call.result()


def _await(future: Future[Any], seconds: float) -> None:
    """Wait until a future is done, or for this long. (``futures.wait`` makes an event and a waiter for each call.)"""
    with contextlib.suppress(futures.TimeoutError):
        future.exception(seconds)


@dataclass(frozen=True)
class Enqueued:
    """A collective on a stream. ``copy``: the same one, to be compared on the calculation stream."""

    collective: Collective
    task: Any
    copy: Collective | None = None

    def shares_ranks_with(self, group: Any) -> bool:
        """Whether another group has two or more ranks in common with this one's."""
        ours = self.collective.group
        return bool(ours.id != group.id and len(set(ours.ranks).intersection(group.ranks)) > 1)


class InFlight(Generic[T]):
    """Stages with enqueued collectives and Paddle's tasks."""

    def __init__(self, engine: StreamEngine, stages: Stages[T], context: CallContext) -> None:
        self._engine = engine
        self.context = context
        self.progress = StageProgress(stages, context)
        self.tasks: list[Enqueued] = []

    @property
    def has_more(self) -> bool:
        return self.progress.stage is not None and self.progress.stage.more

    def result(self) -> T:
        return self._engine.result_of(self)


CALC, OWN = "calc", "own"


class StreamCalls:
    """Paddle's calls. Each returns its task, or None on a rank that is not in the group."""

    def on_own_stream(self, collective: Collective) -> Any:
        """Enqueue on the group's stream, behind what is on the calculation stream."""
        return collective.begin(sync_op=False)

    def on_calc_stream(self, collective: Collective) -> Any:
        """Enqueue on the calculation stream itself; the task says at once that it is complete."""
        return collective.begin(sync_op=True, use_calc_stream=True)


class StreamProof(Protocol):
    """Compares a collective with the same one that had a copy of its input, on the calculation stream."""

    def compare(self, collective: Collective, copy: Collective, context: CallContext) -> None:
        """Both are enqueued, and the calculation stream waits for both. The first one gets the second one's result."""


class StreamEngine(Engine):
    """Enqueues collectives from the computing thread and never reads a device value.

    ``stream`` says where. On the calculation stream (``calc``), which does one thing after the other. Or on a stream of
    each group (``own``): a call with ``sync_op=False`` enqueues the collective after what is enqueued on the
    calculation stream, and returns; ``task.wait()`` makes the calculation stream, not the host, wait for it (Paddle
    3.3.1, ``process_group_nccl.cc``). The chain of tokens makes the program's order the same on every rank.

    Stages end at fixed places: those with ``more`` at the next ``step_on``, the last one where the result is needed.
    Two groups that share two or more ranks are never in flight at the same time: devices that run two communicators'
    kernels in different orders deadlock.
    """

    reads_values = False
    side_by_side = False
    averages = True
    barrier_margin_seconds = _STREAM_BARRIER_MARGIN_SECONDS

    def __init__(
        self, device: HostDevice, attribute_failure: AttributeFailure, watchdog: Watchdog, calls: StreamCalls
    ) -> None:
        super().__init__(device, attribute_failure)
        self.calls = calls
        self.stream = CALC
        self.proof: StreamProof | None = None
        """What compares collectives on own streams with the calculation stream, while it is there."""
        self._asked_for: str | None = None
        self._watchdog = watchdog
        self._in_flight: list[InFlight[Any]] = []
        self._background = WorkerThread("fleet_train barriers", None)

    def use(self, stream: str) -> None:
        """Run collectives on this stream from now on. Raises ProfileError if a program of the job has another one."""
        if self._asked_for not in (None, stream):
            raise ProfileError(
                f"collective_stream: {stream}, but a program of this job has {self._asked_for} already, and all share "
                "its communicators; give all profiles of a job the same"
            )
        self._asked_for = self.stream = stream

    def start(
        self, stages: Stages[T], context: CallContext, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> InFlight[T]:
        """Start stages on the computing thread, where everything runs here; ``communicator`` is unused."""
        del communicator
        if barrier is not None:
            barrier.result()
        running = InFlight(self, stages, context)
        self._in_flight.append(running)
        with ensured_dynamic_mode():
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
        with ensured_dynamic_mode():
            self._await(running)
            running.progress.go_on()
            self._enqueue(running)

    def _await(self, running: InFlight[Any]) -> None:
        """Make the calculation stream wait for the current stage."""
        ended, running.tasks = running.tasks, []
        copies = [enqueued for enqueued in ended if enqueued.copy is not None]
        # A communicator is on one stream at a time: what is compared runs when nothing else is in flight.
        others = [each for other in self._in_flight for each in other.tasks] if copies else []
        with self.attributing(running.context):
            for enqueued in (*ended, *others):
                enqueued.task.wait()
        for enqueued in copies:
            assert enqueued.copy is not None
            self._begin(enqueued.copy, CALC, running)
            if self.proof is not None:
                self.proof.compare(enqueued.collective, enqueued.copy, running.context)

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
        for others in (enqueued for other in self._in_flight for enqueued in other.tasks):
            if others.shares_ranks_with(collective.group):
                others.task.wait()
        is_compared = self.stream == OWN and self.proof is not None and collective.group.is_member()
        copy = collective.copied() if is_compared else None
        task = self._begin(collective, self.stream, running)
        if task is not None:
            running.tasks.append(Enqueued(collective, task, copy))

    def _begin(self, collective: Collective, stream: str, running: InFlight[Any]) -> Any:
        call = self.calls.on_calc_stream if stream == CALC else self.calls.on_own_stream
        event = begin_wire(collective, running.context)
        with self.attributing(running.context), self._watchdog.over_a_call(running.context):
            task = call(collective)
        if task is not None and stream == CALC:
            task = OnCalcStream(self.device.moment())  # Paddle's says that it is complete at once
        if task is not None:
            self._watchdog.watch(task, running.context, event)
        return task


class OnCalcStream:
    """The task of what is on the calculation stream: complete when that has passed ``moment``."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    def wait(self) -> None:
        """Do nothing: whatever follows on the stream waits anyway."""

    def is_completed(self) -> bool:
        return self._moment.has_passed()


class _Call:
    """A host call that may block, as a task."""

    def __init__(self) -> None:
        self.has_returned = False

    def is_completed(self) -> bool:
        return self.has_returned


@dataclass
class _Watched:
    task: Any
    context: CallContext
    event: int = -1
    has_ended: bool = False


class Watchdog:
    """Detects collectives that do not end, while the computing thread may be in a wait that no signal interrupts.

    It polls the tasks in flight on its own thread, does not touch a device's stream, and drops no task: the computing
    thread does (``cudaEventDestroy``). A task whose query fails counts as unfinished; the failure is logged.

    ``on_stuck`` is called, once and on that thread, with the oldest task's context and the seconds without progress:
    when no task has ended for ``timeout_seconds`` of that context, or earlier when ``is_hopeless``: a rank is gone, or
    another rank's watchdog has given up.
    """

    def __init__(self, on_stuck: Callable[[CallContext, float], None], is_hopeless: Callable[[], bool]) -> None:
        self._on_stuck = on_stuck
        self._is_hopeless = is_hopeless
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._progressed = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def watch(self, task: Any, context: CallContext, event: int = -1) -> None:
        """Watch a task. ``task``: Paddle's, with ``is_completed()``. ``event``: of the flight recorder, which ends when
        this sees the end of the task, up to `timeouts.WATCHDOG_POLL_SECONDS` late."""
        with self._lock:
            going_on = [watched for watched in self._watched if not watched.has_ended]
            if not going_on:
                self._progressed = time.monotonic()
            ended, self._watched = self._watched, [*going_on, _Watched(task, context, event)]
        del ended  # on this thread
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
        """Whether a collective cannot end. A store that does not answer counts as gone, with the rank that hosts it."""
        try:
            return self._is_hopeless()
        except FleetTrainError:
            return True

    def _oldest(self) -> tuple[CallContext | None, float]:
        """The context of the oldest unfinished task, and the seconds since a task last ended."""
        with self._lock:
            for watched in self._watched:
                if not watched.has_ended and self._is_over(watched):
                    watched.has_ended, self._progressed = True, time.monotonic()
                    recorder.end(watched.event)
            going_on = [watched.context for watched in self._watched if not watched.has_ended]
            return (going_on[0] if going_on else None), time.monotonic() - self._progressed

    def _is_over(self, watched: _Watched) -> bool:
        try:
            return bool(watched.task.is_completed())
        except Exception as error:
            if not self._has_failed:
                logger.error("%s: the device cannot be asked whether it is done: %s", watched.context.what, error)
            self._has_failed = True
            return False
