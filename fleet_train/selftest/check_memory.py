"""The memory of a GPU that a training takes, beside Paddle's own program."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, timeouts
from fleet_train.collectives.job import Job
from fleet_train.profile import Profile
from fleet_train.selftest.options import OK, SKIP, Result, SelftestOptions
from fleet_train.selftest.training import CLASSES, FEATURES, Trained, TriedNetwork, computes_on_gpu

WIDTH, LAYERS, SAMPLES, STEPS = 4096, 8, 512, 5
"""So large that buckets of several sizes are on the way while the device computes."""
_BUCKET_MEGABYTES = 32.0


def check(job: Job, _: SelftestOptions, stream: str) -> Iterator[Result]:
    """Of the device's memory, by Paddle's counts: what our program takes at most, less what the plain one does."""
    if not computes_on_gpu():
        yield Result("memory", f"memory of {stream}", SKIP, "measured on GPUs only")
        return
    began, random = time.perf_counter(), np.random.default_rng(job.cluster.rank)
    features = random.standard_normal((SAMPLES, FEATURES)).astype("float32")
    labels = random.integers(0, CLASSES, (SAMPLES, 1)).astype("int64")
    profile = Profile(
        nccl_comm_num=1,
        collective_stream=stream,
        fuse_grad_size_in_MB=_BUCKET_MEGABYTES,
        last_comm_group_size_MB=1.0,
        collective_timeout_seconds=timeouts.SELFTEST_TRAINING_SECONDS,
    )

    def most(profile: Profile | None) -> int:
        paddle.device.cuda.reset_max_memory_allocated()
        before: int = paddle.device.cuda.memory_allocated()
        trained = _program(profile)
        for _ in range(STEPS):
            trained.step(features, labels)
        paddle.device.synchronize()
        return int(paddle.device.cuda.max_memory_allocated()) - before

    everybody = job.all_gather("selftest memory", [most(None), most(profile)])
    yield judge(stream, everybody, time.perf_counter() - began)


def _program(profile: Profile | None) -> Trained:
    """Paddle's own, without communication, if ``profile`` is None."""

    def build(features: Any) -> Any:
        hidden = F.tanh(nn.Linear(FEATURES, WIDTH)(features))
        for _ in range(LAYERS):
            hidden = F.tanh(nn.Linear(WIDTH, WIDTH)(hidden))
        return nn.Linear(WIDTH, CLASSES)(hidden)

    def wrap(inner: Any) -> Any:
        return inner if profile is None else fleet.distributed_optimizer(inner, profile)

    return Trained(TriedNetwork("memory", build), wrap, lambda: paddle.optimizer.SGD(0.001))


def judge(stream: str, everybody: Mapping[int, Sequence[int]], seconds: float) -> Result:
    """``everybody``: by rank, the most bytes of the plain program and of ours. A figure, which fails nothing."""
    plain, ours = max(everybody.values(), key=lambda both: both[1] - both[0])
    figures = {"plain_bytes": plain, "our_bytes": ours, "extra_bytes": ours - plain}
    words = f"{(ours - plain) / 2**20:.0f} MiB beside the {plain / 2**20:.0f} MiB of Paddle's own program on one rank"
    return Result("memory", f"memory of {stream}", OK, f"{words}, without NCCL's own buffers", seconds, figures)
