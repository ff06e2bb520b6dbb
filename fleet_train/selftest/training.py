"""Small networks and their batches, trained through the facade or on one process; and a rank that fails on purpose."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, timeouts
from fleet_train.collectives.engine import CallContext, Stage, Stages
from fleet_train.collectives.job import Job
from fleet_train.profile import Profile
from fleet_train.selftest.options import SelftestOptions


def computes_on_gpu() -> bool:
    """Whether this rank computes on one."""
    return not isinstance(fleet.place(), paddle.CPUPlace)


class SmallProgram:
    """A network with its loss on this rank's device, in separate programs and scope. ``finish(loss, startup)`` adds
    what comes after the loss."""

    def __init__(self, network: TriedNetwork, finish: Callable[[Any, Any], object]) -> None:
        self.main, self.startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        self.exe = paddle.static.Executor(fleet.place())
        with paddle.static.program_guard(self.main, self.startup), paddle.utils.unique_name.guard():
            features = paddle.static.data("features", [None, FEATURES], "float32")
            labels = paddle.static.data("labels", [None, 1], "int64")
            self.loss = nn.functional.cross_entropy(network.build(features), labels)
            finish(self.loss, self.startup)
        with paddle.static.scope_guard(self.scope):
            self.exe.run(self.startup)

    def run(self, features: Array, labels: Array, *more: Any) -> list[Any]:
        """The loss, and the values of ``more``."""
        with paddle.static.scope_guard(self.scope):
            feed = {"features": features, "labels": labels}
            values: list[Any] = self.exe.run(self.main, feed=feed, fetch_list=[self.loss, *more])
        return values

    def state(self) -> dict[str, Array]:
        return {name: np.array(value) for name, value in self.main.state_dict("all", self.scope).items()}

    def start_from(self, state: Mapping[str, Array]) -> None:
        for name, value in self.main.state_dict("all", self.scope).items():
            value.set(state[name], fleet.place())


class Trained(SmallProgram):
    """``wrap`` is applied to the optimizer: ``fleet.distributed_optimizer``, or the identity."""

    def __init__(self, network: TriedNetwork, wrap: Callable[[Any], Any], make_optimizer: Callable[[], Any]) -> None:
        self.optimizer = wrap(make_optimizer())
        super().__init__(network, self.optimizer.minimize)

    def step(self, features: Array, labels: Array) -> float:
        (loss,) = self.run(features, labels)
        advance_rate(self.optimizer)
        return float(loss.item())

    def parameters(self) -> dict[str, Array]:
        names = [parameter.name for parameter in self.main.global_block().all_parameters()]
        return {name: value for name, value in self.state().items() if name in names}


def advance_rate(optimizer: Any) -> None:
    if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
        optimizer._learning_rate.step()


FEATURES = 16
CLASSES = 5
SAMPLES_PER_RANK = 6

Array = np.ndarray[Any, Any]
Batch = tuple[Array, Array]


@dataclass(frozen=True)
class TriedNetwork:
    """``build(features) -> logits``; features are [batch, FEATURES] float32."""

    name: str
    build: Callable[[Any], Any]


def large_and_tiny(features: Any) -> Any:
    hidden = F.tanh(nn.Linear(FEATURES, 600)(features))
    hidden = F.tanh(nn.Linear(600, 500)(hidden))  # 1.2 MB: past the first bucket's bound
    for i in range(4):
        start = nn.initializer.Constant(1.1)
        hidden = hidden * paddle.static.create_parameter([1], "float32", name=f"scale_{i}", default_initializer=start)
    return nn.Linear(500, CLASSES)(hidden)


def with_batch_norm(features: Any) -> Any:
    # no bias: batch norm would remove it, and its gradient is rounding noise
    hidden = paddle.nn.BatchNorm1D(12)(paddle.nn.Linear(FEATURES, 12, bias_attr=False)(features))
    return paddle.nn.Linear(12, 5)(paddle.tanh(hidden))


SEVERAL_BUCKETS = TriedNetwork("large_and_tiny", large_and_tiny)
BATCH_NORM = TriedNetwork("with_batch_norm", with_batch_norm)


def batches(steps: int, samples: int, seed: int) -> list[Batch]:
    """``steps`` joint batches: features [samples, FEATURES] float32, labels [samples, 1] int64."""
    random = np.random.default_rng(seed)
    return [
        (
            random.standard_normal((samples, FEATURES)).astype("float32"),
            random.integers(0, CLASSES, (samples, 1)).astype("int64"),
        )
        for _ in range(steps)
    ]


def share(rank: int) -> slice:
    """A rank's part of the joint batch."""
    return slice(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)


def relative_difference(ours: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """The largest difference of a value, relative to the largest value of its array."""
    assert ours.keys() == expected.keys()
    return max(float(np.abs(ours[n] - expected[n]).max() / max(np.abs(expected[n]).max(), 1e-6)) for n in ours)


def digest(arrays: Mapping[str, Any]) -> str:
    """A digest of named arrays: equal digests mean bit-equal values, whatever the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(np.asarray(arrays[name]))
        sha.update(f"{name}{value.dtype}{value.shape}".encode() + value.tobytes())
    return sha.hexdigest()


FAULT_STEP = 4
_DIFFERENT_BATCHES = 8

IN_PROBE, IN_STEP, IN_SAVE = (f"is killed in {where}" for where in ("the probe", "a step", "a save"))

T = TypeVar("T")


def train_and_fail(kind: str, job: Job, options: SelftestOptions, note: Callable[[], None], folder: Path) -> None:
    """Check 4, in the subjects: train until the others end, or this rank, the last one, fails on purpose. ``note`` is
    called right before the fault; ``folder``: of what is saved."""
    fails = job.cluster.rank == job.world_size - 1
    if fails and kind == IN_PROBE:
        die_in_a_collective(job, note, "probe")
    profile = Profile(collective_timeout_seconds=options.fault_timeout_seconds, nccl_comm_num=2)
    trained = Trained(
        BATCH_NORM if kind == IN_SAVE else SEVERAL_BUCKETS,  # a save averages its statistics
        lambda inner: fleet.distributed_optimizer(inner, profile),
        lambda: paddle.optimizer.SGD(0.01),
    )
    if kind == IN_PROBE:
        sys.exit("the link was not measured")
    data = batches(_DIFFERENT_BATCHES, SAMPLES_PER_RANK * job.world_size, seed=0)
    mine = share(job.cluster.rank)
    job.barrier("selftest: ready")  # the time until here does not count
    for step in itertools.count(1):
        if step == FAULT_STEP and fails:
            fail(kind, job, note)
        if step == FAULT_STEP and kind == IN_SAVE:
            with paddle.static.scope_guard(trained.scope):
                fleet.save_persistables(trained.exe, folder, trained.main)
        features, labels = data[step % _DIFFERENT_BATCHES]
        trained.step(features[mine], labels[mine])


def fail(kind: str, job: Job, note: Callable[[], None]) -> None:
    if kind in (IN_STEP, IN_SAVE):
        die_in_a_collective(job, note)
        return
    note()
    if kind == "skips a collective":
        skip(job)
    else:
        os.kill(os.getpid(), {"is stopped": signal.SIGSTOP, "is killed": signal.SIGKILL}[kind])


def die_in_a_collective(job: Job, note: Callable[[], None], moment: str = "") -> None:
    """Of this rank's next collectives, the first one whose moment begins like this kills it."""

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def start(stages: Stages[T], context: CallContext, *args: Any, **options: Any) -> Any:
            if context.moment.startswith(moment):
                note()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(stages, context, *args, **options)

        return start

    engine: Any = job.engine
    engine.start, engine.run_here = deadly(engine.start), deadly(engine.run_here)


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
    """Until the supervisor ends this process, or for some minutes."""
    alone = Trained(SEVERAL_BUCKETS, lambda inner: inner, lambda: paddle.optimizer.SGD(0.01))
    (batch,) = batches(1, SAMPLES_PER_RANK, seed=0)
    until = time.monotonic() + timeouts.SELFTEST_COMPUTE_ON_SECONDS
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
