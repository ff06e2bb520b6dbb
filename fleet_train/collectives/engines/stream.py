"""The engine for backends whose calls are enqueued on a device's streams (NCCL).

A call with ``sync_op=False`` enqueues the collective on its group's stream, after what is enqueued on the calculation
stream, and returns; ``task.wait()`` makes the calculation stream, not the host, wait for it (Paddle 3.3.1,
``process_group_nccl.cc``). So the computing thread enqueues everything in program order, which the chain of tokens
makes the same on every rank, and waits are placed where the results are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fleet_train.collectives.engines.device import Device
from fleet_train.collectives.engines.engine import Place
from fleet_train.collectives.engines.stages import Collective, Progress, Stages
from fleet_train.collectives.engines.thread import AttributeFailure
from fleet_train.collectives.engines.watchdog import Watchdog
from fleet_train.collectives.engines.worker_thread import WorkerThread
from fleet_train.collectives.paddle_compat.modes import ensured_dynamic_mode
from fleet_train.errors import FleetTrainError

T = TypeVar("T")
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
