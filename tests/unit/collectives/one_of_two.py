"""One rank of two, whose peer always sends the same: an exchange's effect on real buffers, in one process.

Collectives are those of the late group (``tests.support.late``), carried out by arithmetic instead of Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.engine import CallContext, Collective
from fleet_train.collectives.engines import StreamEngine
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.step_notes import StepClock, StepNotes
from fleet_train.errors import WorkerFailed
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.profile import Profile
from tests.support.agreeing import AgreeingJob
from tests.support.late import LateBackend, LateDevice
from tests.unit.collectives.in_turn import unwatched


@dataclass(frozen=True)
class Pair:
    """A process group of the two."""

    id: int = 0
    ranks: Sequence[int] = (0, 1)
    rank: int = 0

    def is_member(self) -> bool:
        return True


class OneOfTwo(AgreeingJob):
    """Rank 0 of a job without a store."""

    def __init__(self) -> None:
        super().__init__(Cluster.imagined(2, 1), paddle.CPUPlace())
        self.device, self.backend = LateDevice(), LateBackend(paddle.CPUPlace(), seed=0)
        self.engine = StreamEngine(self.device, self.attribute_failure, unwatched(), self.backend)
        self.clock = StepClock(self.device.moment)
        self.notes = StepNotes(self.cluster, self.clock, self._times_up_to)
        self.barriers: list[str] = []
        """The names of the step barriers, in order."""

    def met(self, name: str) -> None:
        if name.startswith("barrier "):
            self.barriers.append(name.removeprefix("barrier "))

    def communicators(self, number: int) -> list[Any]:
        return [Pair(index) for index in range(number)]

    def attribute_failure(self, context: CallContext, error: BaseException) -> WorkerFailed:
        return WorkerFailed(f"{context.what}: {error}")


def by_arithmetic(collective: Collective, _: bool) -> None:
    """What a collective does whose other member has brought the same."""
    if collective.kind == "all_reduce":
        factor = 2.0 if collective.op == "sum" else 1.0
        paddle.assign(collective.tensor * factor, output=collective.tensor)
    elif collective.kind == "all_gather":
        paddle.assign(paddle.concat([collective.tensor] * 2).reshape(collective.output.shape), collective.output)
    elif collective.kind == "gather":
        collective.output.extend(collective.tensor.clone() for _ in collective.group.ranks)


@contextmanager
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    monkeypatch.setattr(Collective, "_begin", by_arithmetic)
    job = OneOfTwo()
    try:
        yield job
    finally:
        job.engine.stop()
        job.backend.stop()


def exchange_of(
    job: Job, shapes: Sequence[Sequence[int]], rate: Callable[[], float] = lambda: 0.1, **settings: Any
) -> GradientExchange:
    """The exchange of a program with a float32 parameter of each shape."""
    profile = Profile(**settings)
    gradients = [TensorSpec(f"p{index}", tuple(shape), "float32") for index, shape in enumerate(shapes)]
    averaged = gradients if profile.use_local_sgd else []
    return GradientExchange(job, build_plan(gradients, job.cluster, profile, averaged), profile, rate)
