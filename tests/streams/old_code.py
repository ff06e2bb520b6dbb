"""Engines that must be found faulty: the old one on NCCL, and the new one without one of its rules."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any, TypeVar

from fleet_train.collectives.engine import CallContext, Collective, Progress, Stages
from fleet_train.collectives.engines import Enqueued, InFlight, Result, StreamEngine, ThreadEngine
from fleet_train.collectives.job import Job
from tests.streams.played import PlayedDevice, PlayedWatchdog
from tests.streams.recorder import Recorder

T = TypeVar("T")


class OldEngine(ThreadEngine):
    """What all jobs had once, on NCCL too: the communicators' threads call with ``sync_op=True`` and read values."""

    def __init__(self, recorder: Recorder, job: Job) -> None:
        super().__init__(job.place, job.attribute_failure)
        self._recorder = recorder

    def start(
        self, stages: Stages[T], context: CallContext, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> Result[T]:
        with self._recorder.inside(context.what):
            return super().start(stages, context, communicator, barrier)

    def run_here(self, stages: Stages[T], context: CallContext) -> T:
        with self._recorder.inside(context.what):
            return super().run_here(stages, context)


class OnlyReads(OldEngine):
    """The communicators' threads, with calls after which the calculation stream does not wait: what is left to stand
    still are the reads of values. (The results would be wrong.)"""

    def _carry_out(self, context: CallContext, progress: Progress[T]) -> T:
        del context
        while progress.stage is not None:
            for collective in progress.stage.collectives:
                collective.begin(sync_op=False)
            progress.go_on()
        return progress.value  # type: ignore[return-value]


class _Mutant(StreamEngine):
    def __init__(self, recorder: Recorder, job: Job) -> None:
        watchdog: Any = PlayedWatchdog(recorder)
        super().__init__(PlayedDevice(recorder), job.attribute_failure, watchdog)


class EndsWhenComplete(_Mutant):
    """Ends stages when their collectives happen to be complete, which differs between ranks."""

    def __init__(self, recorder: Recorder, job: Job) -> None:
        super().__init__(recorder, job)
        self._random = random.Random(recorder.trace.rank)

    def step_on(self) -> None:
        for running in list(self._in_flight):
            if running.has_more and self._random.random() < 0.5:
                self._end_stage(running)


class WithoutGroupRule(_Mutant):
    """Has groups that share two ranks in flight at a time."""

    def _begin_one(self, running: InFlight[Any], collective: Collective) -> None:
        with self._watchdog.over_a_call(running.context):
            task = self._begin(collective)
        if task is not None:
            running.tasks.append(Enqueued(collective.group.id, frozenset(collective.group.ranks), task))


class SideBySide(WithoutGroupRule):
    """And keeps the several communicators that a profile asks for; statistics have a group of their own."""

    side_by_side = True
