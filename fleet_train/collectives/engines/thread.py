"""The engine for backends whose calls block the host (Gloo): each communicator has a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from fleet_train.collectives.engines.device import Device, HostDevice
from fleet_train.collectives.engines.engine import Place
from fleet_train.collectives.engines.stages import Progress, Stages, carry_out
from fleet_train.collectives.worker_thread import WorkerThread
from fleet_train.errors import FleetTrainError

T = TypeVar("T")
Blame = Callable[[Place, BaseException], FleetTrainError]


class ThreadEngine:
    """What all ranks start on a communicator in the same order, its thread carries out in the same order.

    There is one thread per communicator, whatever number of programs the job has. The first part of stages runs on
    the thread that starts them, up to their ``HAND_OVER``. ``blame`` makes the error for a collective that has failed.
    """

    reads_values = True
    side_by_side = True
    gate_margin_seconds = 0.0

    def __init__(self, device_place: Any, blame: Blame) -> None:
        self.device: Device = HostDevice()
        self._device_place = device_place
        self._blame = blame
        self._threads: list[WorkerThread] = []

    def start(
        self, stages: Stages[T], place: Place, communicator: int = 0, gate: Future[Any] | None = None
    ) -> Future[T]:
        progress = Progress(stages)

        def rest() -> T:
            if gate is not None:
                gate.result()
            return self._blaming(place, progress)

        return self._submit(communicator, rest)

    def run_here(self, stages: Stages[T], place: Place) -> T:
        return self._blaming(place, Progress(stages))

    def step_on(self) -> None:
        """Threads go on by themselves."""

    def beside(self, task: Callable[[], T]) -> Future[T]:
        """On the first communicator's thread: its collectives behind a gate must wait for the gate anyway."""
        return self._submit(0, task)

    def stop(self) -> None:
        for thread in self._threads:
            thread.stop()

    def _submit(self, communicator: int, task: Callable[[], T]) -> Future[T]:
        while len(self._threads) <= communicator:
            name = f"fleet_train communicator {len(self._threads)}"
            self._threads.append(WorkerThread(name, self._device_place))
        return self._threads[communicator].submit(task)

    def _blaming(self, place: Place, progress: Progress[T]) -> T:
        try:
            return carry_out(progress)
        except FleetTrainError:
            raise
        except Exception as error:
            raise self._blame(place, error) from error
