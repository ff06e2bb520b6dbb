"""Check 3: how much of the communication overlaps with computing, and a negative control."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, timeouts
from fleet_train.collectives.engine import CallContext
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.convert.session import current
from fleet_train.profile import Profile
from fleet_train.profile.knobs import AUTO
from fleet_train.selftest.options import FAIL, OK, SKIP, WARN, Options, Result
from fleet_train.selftest.training import CLASSES, FEATURES, Array, Network, Trained, computes_on_gpu

COMPUTE, COMMUNICATION, SERIAL, OURS = "compute", "communication", "serial", "ours"
CONTROL, CONTROL_SERIAL = "control", "control, serial"
TURNS = (COMPUTE, COMMUNICATION, SERIAL, OURS, CONTROL_SERIAL, CONTROL)
CONTROL_WITHIN = 0.15
"""Deviation from 0, on an idle machine: training with one bucket, waited for where it starts, hides nothing."""
_ONE_BUCKET_MEGABYTES = 4096.0
EXPECTED_ON_GPUS = 0.3


@dataclass(frozen=True)
class Size:
    """Layers of ``width`` x ``width``, so large that both computing and sending take measurable time."""

    width: int
    layers: int
    samples: int
    bucket_megabytes: float
    steps_per_turn: int


ON_CPU = Size(width=512, layers=8, samples=96, bucket_megabytes=2, steps_per_turn=3)
ON_GPU = Size(width=4096, layers=8, samples=512, bucket_megabytes=32, steps_per_turn=5)


def check(job: Job, options: Options, stream: str = AUTO) -> Iterator[Result]:
    if job.world_size == 1:
        yield Result("overlap", "overlap", SKIP, "one rank communicates nothing")
        return
    began = time.perf_counter()
    size = ON_GPU if computes_on_gpu() else ON_CPU
    times = _measure(job, _turns(job, size, stream), size.steps_per_turn, options.rounds)
    everybody = job.all_gather("selftest overlap", times)
    slowest = {turn: np.max([rank_times[turn] for rank_times in everybody.values()], axis=0).tolist() for turn in TURNS}
    result = judge(slowest, computes_on_gpu() and stream != AUTO, time.perf_counter() - began)
    yield result if stream == AUTO else replace(result, name=f"overlap of {stream}")


Turn = Callable[[], None]


def _turns(job: Job, size: Size, stream: str) -> dict[str, Turn]:
    """One step of each; when it returns, the device is done."""
    network, batch = _network(size), _batch(size, job.cluster.rank)
    one_bucket = {"fuse_grad_size_in_MB": _ONE_BUCKET_MEGABYTES, "sync_nccl_allreduce": True}
    alone, ours, control = (_program(network, settings, size, stream) for settings in (None, {}, one_bucket))
    communicate, communicate_once = _communication(job, ours), _communication(job, control)

    def step(trained: Trained) -> None:
        trained.step(*batch)
        _await_device()

    def after_computing(then: Turn) -> None:
        step(alone)
        then()

    return {
        COMPUTE: lambda: step(alone),
        COMMUNICATION: communicate,
        SERIAL: lambda: after_computing(communicate),
        OURS: lambda: step(ours),
        CONTROL_SERIAL: lambda: after_computing(communicate_once),
        CONTROL: lambda: step(control),
    }


def _network(size: Size) -> Network:
    def build(features: Any) -> Any:
        hidden = F.tanh(nn.Linear(FEATURES, size.width)(features))
        for _ in range(size.layers):
            hidden = F.tanh(nn.Linear(size.width, size.width)(hidden))
        return nn.Linear(size.width, CLASSES)(hidden)

    return Network("overlap", build)


def _batch(size: Size, rank: int) -> tuple[Array, Array]:
    random = np.random.default_rng(rank)
    features = random.standard_normal((size.samples, FEATURES)).astype("float32")
    return features, random.integers(0, CLASSES, (size.samples, 1)).astype("int64")


def _program(network: Network, settings: Mapping[str, Any] | None, size: Size, stream: str) -> Trained:
    """Without communication if ``settings`` is None."""

    def wrap(inner: Any) -> Any:
        if settings is None:
            return inner
        bounds: dict[str, Any] = {
            "nccl_comm_num": 1,
            "collective_stream": stream,
            "fuse_grad_size_in_MB": size.bucket_megabytes,
            "last_comm_group_size_MB": 1.0,
            "collective_timeout_seconds": timeouts.SELFTEST_TRAINING_SECONDS,
        }
        return fleet.distributed_optimizer(inner, Profile(**{**bounds, **settings}))

    return Trained(network, wrap, lambda: paddle.optimizer.SGD(0.001))


def check_memory(job: Job, _: Options, stream: str) -> Iterator[Result]:
    """Of the device's memory, by Paddle's counts: what our program takes at most, less what the plain one does."""
    if not computes_on_gpu():
        yield Result("overlap", f"memory of {stream}", SKIP, "measured on GPUs only")
        return
    began, batch = time.perf_counter(), _batch(ON_GPU, job.cluster.rank)

    def most(settings: Mapping[str, Any] | None) -> int:
        paddle.device.cuda.reset_max_memory_allocated()
        before: int = paddle.device.cuda.memory_allocated()
        trained = _program(_network(ON_GPU), settings, ON_GPU, stream)
        for _ in range(ON_GPU.steps_per_turn):
            trained.step(*batch)
        _await_device()
        return int(paddle.device.cuda.max_memory_allocated()) - before

    everybody = job.all_gather("selftest memory", [most(None), most({})])
    yield judge_memory(stream, everybody, time.perf_counter() - began)


def judge_memory(stream: str, everybody: Mapping[int, Sequence[int]], seconds: float) -> Result:
    """``everybody``: by rank, the most bytes of the plain program and of ours. A figure, which fails nothing."""
    plain, ours = max(everybody.values(), key=lambda both: both[1] - both[0])
    figures = {"plain_bytes": plain, "our_bytes": ours, "extra_bytes": ours - plain}
    words = f"{(ours - plain) / 2**20:.0f} MiB beside the {plain / 2**20:.0f} MiB of Paddle's own program on one rank"
    return Result("overlap", f"memory of {stream}", OK, f"{words}, without NCCL's own buffers", seconds, figures)


def _communication(job: Job, trained: Trained) -> Turn:
    """Sends the buckets of a step, one after the other; the device is done when it returns."""
    exchange = next(exchange for main, exchange in current().exchanges if main is trained.main)
    gradients = _gradients(job, exchange)

    def communicate() -> None:
        for (bucket, method), own in zip(exchange.methods, gradients, strict=True):
            context = CallContext(
                "selftest overlap", f"selftest: {bucket.describe()}", timeouts.SELFTEST_TRAINING_SECONDS
            )
            job.engine.start(method.average(own), context, bucket.communicator).result()
        _await_device()

    return communicate


def _gradients(job: Job, exchange: GradientExchange) -> list[list[Any]]:
    """Of each bucket, on the device."""
    with dynamic_mode():
        return [
            [paddle.ones(list(gradient.shape), gradient.dtype).to(job.place) for gradient in bucket.gradients]
            for bucket, _ in exchange.methods
        ]


def _await_device() -> None:
    if computes_on_gpu():
        paddle.device.synchronize()


def _measure(job: Job, turns: Mapping[str, Turn], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step, one number per round; every turn once per round, so that external load affects all alike."""
    times: dict[str, list[float]] = {turn: [] for turn in TURNS}
    for number in range(-1, rounds):  # the first round is not counted
        for turn in TURNS:
            job.barrier(f"selftest overlap {number} {turn}")
            began = time.perf_counter()
            for _ in range(steps):
                turns[turn]()
            if number >= 0:
                times[turn].append((time.perf_counter() - began) / steps)
    return times


def overlap_of(times: Mapping[str, Sequence[float]], turn: str, one_after_the_other: str) -> float:
    """The share that ``turn`` has saved of what could be saved: 1 = the shorter one of computing and communication is
    hidden completely, 0 = nothing is. The median over the rounds."""
    return statistics.median(
        (serial - overlapped) / min(compute, communication)
        for serial, overlapped, compute, communication in zip(
            times[one_after_the_other], times[turn], times[COMPUTE], times[COMMUNICATION], strict=True
        )
    )


def judge(times: Mapping[str, Sequence[float]], overlaps: bool, seconds: float) -> Result:
    """A figure is required on every machine, a good one where communication ``overlaps``: on GPUs with a stream beside
    the calculation stream. CPUs that compute and send at the same time are shared by both."""
    if any(not value > 0 or not math.isfinite(value) for turn in TURNS for value in times[turn]):
        return Result("overlap", "overlap", FAIL, f"times are missing: {dict(times)}", seconds)
    medians = {turn: statistics.median(times[turn]) * 1e3 for turn in TURNS}
    ours, control = overlap_of(times, OURS, SERIAL), overlap_of(times, CONTROL, CONTROL_SERIAL)
    figures = {
        "overlap": round(ours, 3),
        "control": round(control, 3),
        "milliseconds": {turn: round(value, 3) for turn, value in medians.items()},
        "rounds_seconds": {turn: [round(value, 6) for value in times[turn]] for turn in TURNS},
    }
    words = (
        f"{ours:.2f} of what could be hidden (compute {medians[COMPUTE]:.1f} ms, communication "
        f"{medians[COMMUNICATION]:.1f} ms, one after the other {medians[SERIAL]:.1f} ms, ours {medians[OURS]:.1f} ms); "
        f"negative control, one bucket after the backward pass: {control:.2f}"
    )
    status = OK
    if abs(control) > CONTROL_WITHIN:
        status, words = WARN, f"{words}, should be 0: do not quote these figures (is the machine busy?)"
    elif overlaps and ours < EXPECTED_ON_GPUS:
        status, words = WARN, f"{words}; {EXPECTED_ON_GPUS:g} or more is expected on GPUs"
    elif not overlaps:
        words += "; no figure is required on CPUs, which compute and send by turns, and with collective_stream: calc"
    return Result("overlap", "overlap", status, words, seconds, figures)
