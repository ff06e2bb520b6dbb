"""The engine for backends whose calls block the host (Gloo): each communicator has a thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from fleet_train.collectives.engines.device import Device, HostDevice
from fleet_train.collectives.engines.engine import Place
from fleet_train.collectives.engines.stages import Progress, Stages, carry_out
from fleet_train.collectives.engines.worker_thread import WorkerThread
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
