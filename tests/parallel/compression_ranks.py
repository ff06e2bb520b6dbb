"""Run as ranks by test_compression: drives one bucket method per case for some steps, beside its numpy reference.

Reported per case: ``difference`` (largest relative one of an update to the reference's, all steps), ``updates`` and
``resumed`` (digests of all updates: straight through, and with a new method that took over the state half way).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.collectives.engine import CallContext
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import CastAllreduce, cast_on_host, make_allreduces
from fleet_train.collectives.methods.dgc import DgcMethod
from fleet_train.collectives.methods.powersgd import PowerSgdMethod
from fleet_train.collectives.methods.quantised import QuantisedMethod, QuantisedSums
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.convert.fleet import _current
from fleet_train.plan import Bucket, CommPlan, TensorSpec
from fleet_train.plan.simulate_methods import (
    DgcSimulation,
    PowerSgdSimulation,
    QuantisedSum,
    cut,
    mean,
    ring_sum_16_bit,
    to_bfloat16,
)
from fleet_train.profile.methods.base import CollectiveSpec, QuantisedSettings
from fleet_train.profile.methods.dgc import DgcSettings
from fleet_train.profile.methods.powersgd import PowerSgdSettings
from tests.support.worker import digest, report

STEPS = 8
SHAPES = {"w0": (24, 40), "b0": (40,), "w1": (24, 40), "scale": (), "conv": (8, 3, 3, 3), "b1": (7,), "w2": (40, 5)}
# Past the size from which DGC guesses.
LARGE = {"large": (260, 300), "b": (300,)}
BUCKETS = {
    large: Bucket(3, tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items()), 0)
    for large, shapes in ((False, SHAPES), (True, LARGE))
}

POWERSGD = {
    "rank 1": PowerSgdSettings(),
    "rank 2": PowerSgdSettings(rank=2, min_compression=1.0, seed=5),
    "rank 4 after 3 steps": PowerSgdSettings(rank=4, start_step=3, min_compression=1.0),
    "cold": PowerSgdSettings(rank=2, warm_start=False, min_compression=0.0),
    "forgetful": PowerSgdSettings(error_feedback=False),
    "full rank": PowerSgdSettings(rank=40, min_compression=0.0),
    "nothing pays": PowerSgdSettings(min_compression=1000.0),
}
RAMP = (0.5, 0.75, 0.9)
DGC = {
    "constant": DgcSettings(sparsity=(0.9,), min_elements=100),
    "ramp": DgcSettings(rampup_begin_step=2, rampup_step=4, sparsity=RAMP, min_elements=0),
    "nesterov, clipped": DgcSettings(use_nesterov=True, sparsity=(0.8,), local_grad_clip_norm=3.0, min_elements=10),
    "whole": DgcSettings(sparsity=(0.0,), momentum_factor_masking=False, min_elements=0),
    "large": DgcSettings(rampup_step=5, sparsity=(0.9, 0.999)),
    "all small": DgcSettings(min_elements=10**6),
}


QUANTISED = {
    "int8": QuantisedSettings(8),
    "int4": QuantisedSettings(4),
    "int4, small blocks": QuantisedSettings(4, block=32),
    "int8, large": QuantisedSettings(8),
    "int4, forgetful": QuantisedSettings(4, error_feedback=False),
    "int4, stochastic": QuantisedSettings(4, error_feedback=False, stochastic=True),
}


def gradients(bucket: Bucket, seed: int, step: int, rank: int) -> list[np.ndarray]:
    random = np.random.default_rng([seed, step, rank])
    return [random.standard_normal(gradient.shape).astype("float32") for gradient in bucket.gradients]


def make(kind: str, name: str, bucket: Bucket, job: Job) -> tuple[Any, Any]:
    """The real method and its reference."""
    allreduce = make_allreduces(job, 1, 0)[0]
    if kind == "powersgd":
        settings = POWERSGD[name]
        method = PowerSgdMethod(bucket, allreduce, job.world_size, settings, job.engine.reads_values)
        return method, PowerSgdSimulation(bucket, job.world_size, settings)
    if kind == "quantised":
        settings, size = QUANTISED[name], job.world_size
        plan = replace(EMPTY_PLAN, world_size=size, buckets=(sent_in_few_bits(bucket, settings),))
        carried = QuantisedSums(job, plan, [allreduce]).make(0, bucket.gradients[0].name, bucket.elements, settings)
        return QuantisedMethod(bucket, carried, size), QuantisedReference(bucket, size, settings)
    group = job.communicators(1)[0]
    method = DgcMethod(bucket, group, allreduce, job.world_size, DGC[name], job.engine.reads_values)
    return method, DgcSimulation(bucket, job.world_size, DGC[name])


EMPTY_PLAN = CommPlan(1, 1, 1, ())


def sent_in_few_bits(bucket: Bucket, settings: QuantisedSettings) -> Bucket:
    return replace(bucket, sent=(CollectiveSpec("quantised", bucket.nbytes, 4, quantised=settings),))


class QuantisedReference:
    """The simulated sum, as the mean of a bucket's gradients."""

    def __init__(self, bucket: Bucket, world_size: int, settings: QuantisedSettings) -> None:
        self._shapes = [gradient.shape for gradient in bucket.gradients]
        self._sum = QuantisedSum(bucket.gradients[0].name, bucket.elements, world_size, 0, settings)

    def step(self, everyone: list[list[np.ndarray]]) -> list[np.ndarray]:
        flat = [np.concatenate([np.ravel(value) for value in rank]) for rank in everyone]
        return cut(self._sum.sum(flat) * np.float32(1 / len(flat)), self._shapes)


def one_step(method: Any, local: list[np.ndarray], job: Job) -> list[np.ndarray]:
    tensors = [paddle.to_tensor(value, place=job.place) for value in local]
    running = job.engine.start(method.average(tensors), CallContext("a step", "a bucket"))
    for tensor in tensors:
        tensor.zero_()  # a program reuses its gradients' memory as soon as a bucket is launched
    return [np.array(update.numpy()) for update in running.result()]


def drive(kind: str, name: str, seed: int, job: Job) -> dict[str, Any]:
    bucket = BUCKETS["large" in name]
    method, reference = make(kind, name, bucket, job)
    successor = make(kind, name, bucket, job)[0]
    updates: list[list[np.ndarray]] = []
    differences = []
    for step in range(STEPS):
        if step == STEPS // 2:
            successor.load_state({key: value.clone() for key, value in method.state().items()})
        everyone = [gradients(bucket, seed, step, rank) for rank in range(job.world_size)]
        updates.append(one_step(method, everyone[job.cluster.rank], job))
        differences.append(relative_difference(updates[-1], reference.step(everyone)))
    rest = [one_step(successor, gradients(bucket, seed, s, job.cluster.rank), job) for s in range(STEPS // 2, STEPS)]
    return {
        "difference": max(differences),
        "updates": digest_of(updates),
        "second half": digest_of(updates[STEPS // 2 :]),
        "resumed": digest_of(rest),
        "is mean": max(
            relative_difference(update, mean([gradients(bucket, seed, step, rank) for rank in range(job.world_size)]))
            for step, update in enumerate(updates)
        ),
    }


def digest_of(updates: list[list[np.ndarray]]) -> str:
    return digest({f"{i} {j}": value for i, update in enumerate(updates) for j, value in enumerate(update)})


def relative_difference(ours: list[np.ndarray], expected: list[np.ndarray]) -> float:
    assert [one.shape for one in ours] == [other.shape for other in expected]
    pairs = zip(ours, expected, strict=True)
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)


def bfloat16(job: Job, elements: int) -> dict[str, Any]:
    """Sums of bfloat16 buffers: as the reference of Gloo, and how far from the exact sum against the bound."""
    values = [
        np.random.default_rng([elements, r]).standard_normal(elements).astype("float32") for r in range(job.world_size)
    ]
    allreduce = CastAllreduce(make_allreduces(job, 1, 0)[0], "bfloat16", cast_on_host)
    mine = paddle.to_tensor(values[job.cluster.rank], place=job.place)
    total = job.engine.start(allreduce.sum([mine]), CallContext("a sum", "a sum")).result()[0].numpy()
    exact = np.sum(values, axis=0, dtype=np.float64)
    bound = ((1 + 2.0**-8) ** job.world_size - 1) * np.sum(np.abs(values), axis=0)
    return {
        "as gloo": bool((total == ring_sum_16_bit(values, to_bfloat16)).all()),
        "over bound": float((np.abs(total - exact) / bound).max()),
        "bits": digest({"total": total}),
    }


def main() -> None:
    cases = json.loads(sys.argv[1])
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    job = _current().job
    with dynamic_mode():
        results = {f"{kind}, {name}, seed {seed}": drive(kind, name, seed, job) for kind, name, seed in cases}
        sums = {elements: bfloat16(job, elements) for elements in (1, 7, 1003, 3_500_003)}
        half = paddle.ones([3], "float16")
        paddle.distributed.all_reduce(half, group=job.communicators(1)[0])
    report(fleet.worker_index(), cases=results, sums=sums, float16=half.numpy())


main()
