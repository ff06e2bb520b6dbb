"""Check 4, in the subjects: all ranks train, and the last one fails on purpose."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import paddle

from fleet_train import fleet
from fleet_train.collectives.engines.stages import Stage, Stages
from fleet_train.collectives.job.job import Job
from fleet_train.profile import Profile
from fleet_train.selftest.options import Options
from fleet_train.selftest.subjects.networks import SAMPLES_PER_RANK, SEVERAL_BUCKETS, batches, share
from fleet_train.selftest.subjects.training import Trained

FAULT_STEP = 4
_DIFFERENT_BATCHES = 8
_LONGEST_SECONDS = 120.0

T = TypeVar("T")


def train_and_fail(kind: str, job: Job, options: Options, note: Callable[[], None]) -> None:
    """Train until the others end, or this rank does. ``note`` is called right before the fault."""
    profile = Profile(collective_timeout_seconds=options.fault_timeout_seconds, nccl_comm_num=2)
    trained = Trained(
        SEVERAL_BUCKETS, lambda inner: fleet.distributed_optimizer(inner, profile), lambda: paddle.optimizer.SGD(0.01)
    )
    data = batches(_DIFFERENT_BATCHES, SAMPLES_PER_RANK * job.world_size, seed=0)
    mine = share(job.cluster.rank)
    job.barrier("selftest: ready")  # the time until here does not count
    for step in itertools.count(1):
        if step == FAULT_STEP and job.cluster.rank == job.world_size - 1:
            note()
            {"skips a collective": skip, "is stopped": stop, "is killed": die}[kind](job)
        features, labels = data[step % _DIFFERENT_BATCHES]
        trained.step(features[mine], labels[mine])


def die(job: Job) -> None:
    del job
    os.kill(os.getpid(), signal.SIGKILL)


def stop(job: Job) -> None:
    del job
    os.kill(os.getpid(), signal.SIGSTOP)


def skip(job: Job) -> None:
    """Take part in no further collective.

    If calls are enqueued, this rank reaches the barrier and then does not start its part. Gloo's own timeout for that
    is 30 s and names no rank, so there it does not reach the barrier either: it continues to compute alone.
    """
    if job.engine.side_by_side:
        compute_on()
    real: Callable[..., Any] = job.engine.start

    def start(stages: Stages[T], *args: Any, **options: Any) -> Any:
        return real(_without_collectives(stages), *args, **options)

    job.engine.start = start  # type: ignore[method-assign]


def compute_on() -> None:
    """Until the supervisor ends this process, or for ``_LONGEST_SECONDS``."""
    alone = Trained(SEVERAL_BUCKETS, lambda inner: inner, lambda: paddle.optimizer.SGD(0.01))
    (batch,) = batches(1, SAMPLES_PER_RANK, seed=0)
    until = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < until:
        alone.step(*batch)
        time.sleep(0.01)
    sys.exit("this rank was not stopped, although it continued to compute without the others")


def _without_collectives(stages: Stages[T]) -> Stages[T]:
    while True:
        try:
            stage = next(stages)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        yield Stage((), stage.more)
