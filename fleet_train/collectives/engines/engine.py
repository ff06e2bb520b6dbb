"""The interface of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fleet_train.collectives.engines.device import Device
from fleet_train.collectives.engines.stages import Stages

T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Place:
    """Where in a job something is communicated: ``moment`` (a step) is the same on every rank, ``what`` (the bucket
    that this rank has reached) may differ. ``timeout_seconds``: how long it may take while no other collective ends."""

    moment: str
    what: str
    timeout_seconds: float = 300.0


class Running(Protocol[Result_co]):
    """Stages that an engine has started."""

    def result(self) -> Result_co:
        """Wait for the last collective and return the result of the stages. The host waits, or a stream."""


class Engine(Protocol):
    """Carries out stages. All ranks make the same calls in the same order."""

    reads_values: bool
    """Whether the host may read a tensor's value in a step."""
    side_by_side: bool
    """Whether collectives on several communicators over the same ranks run concurrently."""
    device: Device
    barrier_margin_seconds: float
    """How much longer than its timeout a barrier waits, so that ranks inside a collective can first find the missing
    rank, which may be one that has reached the barrier."""

    def start(
        self, stages: Stages[T], place: Place, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> Running[T]:
        """Start ``stages``; their first collective waits until ``barrier`` is done.

        Errors are raised by the result as a FleetTrainError that names the root cause.
        """

    def run_here(self, stages: Stages[T], place: Place) -> T:
        """Carry out ``stages`` in the calling operator: later operators of the program read their result."""

    def step_on(self) -> None:
        """A fixed point of the program, the same on every rank: stages with ``more`` may be ended here."""

    def beside(self, task: Callable[[], T]) -> Future[T]:
        """Run work without devices or process groups (barriers in the store) beside the computing thread."""

    def stop(self) -> None:
        """End the engine's threads."""
