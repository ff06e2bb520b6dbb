"""The cost of exchanging the script's gradients in addition to the link, and its slowdown of concurrent computing:
each compression's methods, run by all ranks while they compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle

from fleet_train import timeouts
from fleet_train.collectives.engine import CallContext, Stages
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import make_allreduces
from fleet_train.collectives.methods.quantised import QuantisedSums
from fleet_train.collectives.methods.registry import Parts
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.plan import CommPlan, TensorSpec
from fleet_train.plan.build import build_chosen
from fleet_train.plan.price import TYPICAL, Costs, Network, Paths
from fleet_train.profile import Profile
from fleet_train.profile.methods import COMPRESSIONS

# Likely sizes; the cost of coding per byte hardly depends on them.
_LARGE_MB, _SMALL_MB = 4.0, 0.5
_FULL_STRENGTH: dict[str, dict[str, Any]] = {
    "powersgd": {"powersgd_start_step": 0},
}
_FEWEST, _MOST = 3, 100
"""How often each method is repeated concurrently with computing, at least and at most."""
_ALONE_STEPS, _ALONE_ROUNDS = 10, 6
"""How many steps before each method are timed alone, and how many exchanges."""

Step = Callable[[], object]


@dataclass(frozen=True)
class _Measured:
    """Of one exchange, on the slowest rank: seconds alone, the part until all was enqueued, seconds concurrently with
    computing, and by how many the computing was delayed."""

    plan: CommPlan
    alone: float
    handing: float
    concurrent: float
    delay: float


def calibrate(job: Job, gradients: Sequence[TensorSpec], network: Network, step: Step) -> tuple[Costs, list[float]]:
    """The costs of exchanges, alone and concurrently with ``step``, which computes and sends nothing, and this rank's
    seconds of a step alone. All ranks call it; all get the same costs.

    The time of an exchange beyond the link's latency and bandwidth is attributed to the collectives as far as more and
    smaller buckets increase it, and to the coding for the rest. If collectives are enqueued (streams), exchanges run
    alone: their slowdown of the device's computing is unknown, and set to 0.
    """
    steps: list[float] = []
    paths = Paths(job.cluster, network)
    cases = {name: _plan(job, gradients, name, _LARGE_MB, paths) for name in COMPRESSIONS if name != "fp16"}
    measured = {name: _measure(job, *case, step, steps) for name, case in cases.items()}
    small = _measure(job, *_plan(job, gradients, "none", _SMALL_MB, paths), step, steps)
    per_collective = _per_collective(measured["none"], small, paths)

    def per_byte(seconds: Callable[[_Measured], float], known: Mapping[str, float]) -> dict[str, float]:
        return {
            **known,
            **{name: max(0.0, seconds(case)) / case.plan.gradient_bytes for name, case in measured.items()},
        }

    costs = replace(
        TYPICAL,
        collective_seconds=per_collective,
        handing_seconds_per_byte=per_byte(lambda case: case.handing, TYPICAL.handing_seconds_per_byte),
        codec_seconds_per_byte=per_byte(
            lambda case: _over(case, paths, per_collective), TYPICAL.codec_seconds_per_byte
        ),
        waiting_seconds_per_byte=per_byte(lambda case: case.concurrent - case.alone, TYPICAL.waiting_seconds_per_byte),
        taken_seconds_per_byte=per_byte(lambda case: case.delay, TYPICAL.taken_seconds_per_byte),
    )
    return costs, steps


def _plan(
    job: Job, gradients: Sequence[TensorSpec], compression: str, megabytes: float, paths: Paths
) -> tuple[CommPlan, Profile]:
    """As many of the gradients as one exchange may send: all, the first half, the first quarter, at least one."""
    buckets = {"nccl_comm_num": 1, "fuse_grad_size_in_MB": megabytes, "last_comm_group_size_MB": megabytes}
    profile = Profile(compression=compression, **buckets, **_FULL_STRENGTH.get(compression, {}))
    some = [replace(gradient, rows=0) for gradient in gradients]
    while True:
        plan = build_chosen(some, job.cluster, profile)
        if len(some) == 1 or _on_the_link(plan, paths) <= timeouts.RECOMMEND_EXCHANGE_SECONDS:
            return plan, profile
        some = some[: len(some) // 2]


def _on_the_link(plan: CommPlan, paths: Paths) -> float:
    return sum(phase.seconds for sent in plan.exchanges() for phase in paths.of(plan, sent))


def _over(case: _Measured, paths: Paths, per_collective: float = 0.0) -> float:
    """The time of an exchange beyond the link, and of its collectives."""
    return max(
        0.0, case.alone - case.handing - _on_the_link(case.plan, paths) - per_collective * len(case.plan.phases())
    )


def _per_collective(large: _Measured, small: _Measured, paths: Paths) -> float:
    """The cost of each collective, from two splits of the same bytes."""
    numbers = len(large.plan.phases()), len(small.plan.phases())
    if numbers[0] == numbers[1]:
        return _over(large, paths) / max(1, numbers[0])
    return max(0.0, (_over(small, paths) - _over(large, paths)) / (numbers[1] - numbers[0]))


def _alone(job: Job, step: Step) -> list[float]:
    """Seconds of steps with nothing concurrent, on all ranks at the same time."""
    _meet(job)
    times: list[float] = []
    while len(times) < _ALONE_STEPS and sum(times) < timeouts.RECOMMEND_ALONE_SECONDS:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def _measure(job: Job, plan: CommPlan, profile: Profile, step: Step, steps: list[float]) -> _Measured:
    """Repeat exchanges, first alone, then concurrently with steps. The times of steps alone are added to ``steps``."""
    context = CallContext("calibration", f"calibrating {profile.compression}", job.timeout_seconds)
    with dynamic_mode(job.place), paddle.no_grad():
        exchange = _Exchange(job, plan, profile)
        took = [_timed(job, lambda: job.engine.run_here(exchange.times(1), context)) for _ in range(_ALONE_ROUNDS)]
    # The first round connects.
    alone = _slowest(job, statistics.median(took[1:]))
    if not job.engine.side_by_side:
        return _Measured(plan, alone, 0.0, alone, 0.0)
    handing = _slowest(job, statistics.median(exchange.handing[1:]))
    own = _alone(job, step)
    steps += own
    number = max(_FEWEST, min(_MOST, int(timeouts.RECOMMEND_METHOD_SECONDS / alone)))
    seconds, delay = _run_concurrently(job, exchange.times(number), context, step, statistics.median(own))
    return _Measured(plan, alone, handing, _slowest(job, seconds / number), _slowest(job, delay / number))


def _run_concurrently(
    job: Job, exchanges: Stages[None], context: CallContext, step: Step, step_alone: float
) -> tuple[float, float]:
    """Compute during ``exchanges``: returns the seconds from their start to their end, and by how many the computing
    was delayed."""
    ended = 0.0

    def noting_the_end() -> Stages[None]:
        nonlocal ended
        try:
            yield from exchanges
        finally:
            ended = time.perf_counter()

    _meet(job)
    began, steps = time.perf_counter(), 0
    with dynamic_mode(job.place), paddle.no_grad():
        running = job.engine.start(noting_the_end(), context)
    while not ended:
        step()
        steps += 1
    computed = time.perf_counter() - began
    running.result()
    return ended - began, max(0.0, computed - steps * step_alone)


class _Exchange:
    """All buckets of a plan, exchanged repeatedly, with unused values."""

    def __init__(self, job: Job, plan: CommPlan, profile: Profile) -> None:
        allreduce = make_allreduces(job, 1, 0)[0]
        sums = QuantisedSums(job, plan, [allreduce]) if plan.is_quantised else None
        self._methods = [Parts(bucket, job, plan, profile, allreduce, sums).make() for bucket in plan.buckets]
        self._values = [
            [paddle.randn(list(gradient.shape)).cast(gradient.dtype) for gradient in bucket.gradients]
            for bucket in plan.buckets
        ]
        self.handing: list[float] = []
        """Of each round, seconds until all buckets' methods would have released the computing thread."""

    def times(self, number: int) -> Stages[None]:
        """The stages of ``number`` rounds."""
        for _ in range(number):
            handing = 0.0
            for method, values in zip(self._methods, self._values, strict=True):
                began = time.perf_counter()
                stages = method.average(values)
                first = next(stages)
                handing += time.perf_counter() - began
                yield first
                yield from stages
            self.handing.append(handing)


def _timed(job: Job, task: Callable[[], object]) -> float:
    """Seconds of ``task`` after a barrier of all ranks; on a device until it has finished."""
    _meet(job)
    began = time.perf_counter()
    task()
    job.engine.device.moment().await_passed()
    return time.perf_counter() - began


def _meet(job: Job) -> None:
    job.barrier(f"calibration {job.count('calibration')}")


def _slowest(job: Job, seconds: float) -> float:
    return float(max(job.all_gather(f"calibrated {job.count('calibrated')}", seconds).values()))
