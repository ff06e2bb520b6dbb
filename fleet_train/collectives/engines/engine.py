"""What an engine does for the code that communicates."""

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
    """Where in a job's life something is communicated: ``moment`` is the same on every rank (a step), ``what`` may
    differ (the bucket that this rank is at). ``timeout_seconds``: how long it may take while nothing else ends."""

    moment: str
    what: str
    timeout_seconds: float = 300.0


class Running(Protocol[Result_co]):
    """Stages that an engine has begun."""

    def result(self) -> Result_co:
        """Wait for the last collective and return what the stages return. The wait is the host's, or a stream's."""


class Engine(Protocol):
    """Carries out stages. All ranks make the same calls in the same order."""

    reads_values: bool
    """Whether the host may read a tensor's value in a step."""
    side_by_side: bool
    """Whether collectives on several communicators over the same ranks run at a time."""
    device: Device
    barrier_margin_seconds: float
    """How much longer than its bound a barrier waits: until the ranks inside a collective have found the missing rank,
    which may be one that went on to the barrier."""

    def start(
        self, stages: Stages[T], place: Place, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> Running[T]:
        """Begin ``stages``; their first collective waits until ``barrier`` is done.

        Errors are raised by the result as a FleetTrainError that names the root cause.
        """

    def run_here(self, stages: Stages[T], place: Place) -> T:
        """Carry out ``stages`` at the calling operator: later operators of the program read their result."""

    def step_on(self) -> None:
        """A fixed point of the program, the same on every rank: stages with ``more`` may be ended here."""

    def beside(self, task: Callable[[], T]) -> Future[T]:
        """Run work without devices or process groups (barriers in the store) beside the computing thread."""

    def stop(self) -> None:
        """End the engine's threads."""
