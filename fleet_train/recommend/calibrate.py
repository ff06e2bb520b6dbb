"""What exchanging the script's gradients costs beside the link: each compression's methods, run alone on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import paddle

from fleet_train.collectives.engines.engine import Place
from fleet_train.collectives.job import Job
from fleet_train.collectives.make_methods import METHODS, make_method
from fleet_train.collectives.modes import dynamic_mode
from fleet_train.collectives.quantised import QuantisedSums
from fleet_train.collectives.reducers import make_reducers
from fleet_train.plan import CommPlan, Gradient
from fleet_train.plan.build import build_settled
from fleet_train.plan.compression_settings import dgc_settings
from fleet_train.plan.costs import TYPICAL, Costs
from fleet_train.plan.predict import Network, Paths
from fleet_train.profile import Profile

# Sizes that a choice is likely to have; what coding costs per byte hardly depends on them.
_BUCKETS: dict[str, Any] = {"nccl_comm_num": 1, "fuse_grad_size_in_MB": 4.0, "last_comm_group_size_MB": 4.0}
_FULL_STRENGTH: dict[str, dict[str, Any]] = {
    "powersgd": {"powersgd_start_step": 0},
    "dgc": {"dgc_rampup_begin_step": 0, "dgc_rampup_steps": 1},
}
_ROUNDS = 3
_LONG_SECONDS = 1.0
"""An exchange that takes longer is timed once."""


def calibrate(job: Job, gradients: Sequence[Gradient], network: Network) -> Costs:
    """Seconds per collective and per coded byte, on the slowest rank. All ranks call it; all get the same.

    What an exchange takes longer than the link's latency and bandwidth say is the collectives' where nothing is coded,
    and the codec's behind that.
    """
    names = [name for name in METHODS if name != "fp16"]
    paths = Paths(job.cluster, network)
    plans = {name: _plan(job, gradients, name) for name in names}
    beside = {
        name: max(0.0, _slowest(job, plan, profile) - _on_the_link(plan, paths))
        for name, (plan, profile) in plans.items()
    }
    per_collective = beside["none"] / max(1, len(plans["none"][0].legs()))
    codecs = {
        name: max(0.0, beside[name] - per_collective * len(plan.legs())) / max(1, plan.gradient_bytes)
        for name, (plan, _) in plans.items()
        if name != "none"
    }
    return replace(
        TYPICAL, collective_seconds=per_collective, codec_seconds_per_byte={**TYPICAL.codec_seconds_per_byte, **codecs}
    )


def _plan(job: Job, gradients: Sequence[Gradient], compression: str) -> tuple[CommPlan, Profile]:
    profile = Profile(compression=compression, **_BUCKETS, **_FULL_STRENGTH.get(compression, {}))
    return build_settled(gradients, job.cluster, profile), profile


def _on_the_link(plan: CommPlan, paths: Paths) -> float:
    return sum(phase.seconds for sent in plan.exchanges() for phase in paths.of(plan, sent))


def _slowest(job: Job, plan: CommPlan, profile: Profile) -> float:
    """Seconds of the exchange of a step, with nothing beside it: the quickest round of the slowest rank."""
    dgc = dgc_settings(profile, 0.9, False) if profile.compression == "dgc" else None
    reducer = make_reducers(job, 1, 0)[0]
    sums = QuantisedSums(job, plan, [reducer]) if plan.is_quantised else None
    methods = [make_method(bucket, job, plan, profile, reducer, dgc, sums) for bucket in plan.buckets]
    times: list[float] = []
    with dynamic_mode(job.place), paddle.no_grad():
        values = [
            [paddle.randn(list(one.shape)).cast(one.dtype) for one in bucket.gradients] for bucket in plan.buckets
        ]
        for _ in range(1 + _ROUNDS):
            job.barrier(f"calibration {job.count('calibration')}")
            began = time.perf_counter()
            for bucket, method, own in zip(plan.buckets, methods, values, strict=True):
                place = Place("calibration", f"calibrating: {bucket.describe()}", job.timeout_seconds)
                job.engine.run_here(method.average(own), place)
            job.engine.device.moment().await_passed()
            times.append(time.perf_counter() - began)
            slowest = max(job.all_gather(f"calibrated {job.count('calibrated')}", times[-1]).values())
            if slowest > _LONG_SECONDS:
                break
    brought = job.all_gather(f"calibrated {job.count('calibrated')}", min(times[1:] or times))
    return float(max(brought.values()))
