"""Compression on 2 to 5 real ranks: as the numpy reference, bit-equal on all ranks, exact after a resume, and in
bytes as planned. The ranks run this file, too.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import fleet, role_maker
from fleet_train.collectives.engine import CallContext
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import CastAllreduce, cast_on_host, make_allreduces
from fleet_train.collectives.methods.dgc import DgcMethod
from fleet_train.collectives.methods.powersgd import PowerSgdMethod
from fleet_train.collectives.methods.quantised import QuantisedMethod, QuantisedSums
from fleet_train.collectives.methods.registry import Parts
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.convert.fleet import _current
from fleet_train.plan import Bucket, CommPlan, TensorSpec, build_plan
from fleet_train.plan.pricing import traffic
from fleet_train.plan.simulate_methods import (
    DgcSimulation,
    PowerSgdSimulation,
    QuantisedSum,
    cut,
    mean,
    ring_sum_16_bit,
    to_bfloat16,
)
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import CollectiveSpec, QuantisedSettings
from fleet_train.profile.methods.dgc import DgcSettings
from fleet_train.profile.methods.powersgd import PowerSgdSettings
from tests.support.ranks import RanksResult, run_ranks
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
    "full rank": PowerSgdSettings(rank=40, min_compression=0.0),
    "nothing pays": PowerSgdSettings(min_compression=1000.0),
}
RAMP = (0.5, 0.75, 0.9)
DGC = {
    "constant": DgcSettings(sparsity=(0.9,), min_elements=100),
    "ramp": DgcSettings(rampup_begin_step=2, rampup_step=4, sparsity=RAMP, min_elements=0),
    "nesterov, clipped": DgcSettings(use_nesterov=True, sparsity=(0.8,), local_grad_clip_norm=3.0, min_elements=10),
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


ELEMENTS, SOCKET_STEPS = 1_000_003, 4
_BYTES_SENT = 200
"""Where ``struct tcp_info`` of linux/tcp.h has bytes_sent and, behind it, bytes_retrans, 64 bits each."""


def bytes_sent() -> int:
    """What all TCP connections of this process have sent, without what was sent again."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
                    total += sent - again
        except OSError:
            continue  # closed meanwhile
    return total


def large_gradient(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).standard_normal(ELEMENTS).astype("float32")


def sockets(bits: int) -> dict[str, Any]:
    job, rank = _current().job, fleet.worker_index()
    profile = Profile(compression=f"int{bits}", fuse_grad_size_in_MB=64.0, nccl_comm_num=1)
    plan = build_plan([TensorSpec("w", (ELEMENTS,), "float32")], job.cluster, profile)
    allreduces = make_allreduces(job, 1, 0)
    sums = QuantisedSums(job, plan, allreduces)
    method = Parts(plan.buckets[0], job, plan, profile, allreduces[0], quantised=sums).make()
    job.barrier(f"groups of int{bits} formed")
    results, total, before = [], np.zeros(ELEMENTS), bytes_sent()
    for step in range(SOCKET_STEPS):
        local = paddle.to_tensor(large_gradient(step, rank))
        results.append(
            job.engine.start(method.average([local]), CallContext(f"step {step}", "a bucket")).result()[0].numpy()
        )
        total += np.mean([large_gradient(step, other) for other in range(job.world_size)], axis=0)
    job.barrier(f"sums of int{bits} received")  # what a rank has handed to its sockets is on its way until then
    sent = bytes_sent() - before
    planned = traffic(plan, job.cluster)
    own = [value[rank] for value in (planned.sent, planned.protocol)]
    return {
        "bits": digest({f"{step}": value for step, value in enumerate(results)}),
        "sent": sent,
        "planned": SOCKET_STEPS * sum(own),
        "worst": float(np.abs(np.sum(results, axis=0) - total).max()),
    }


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    job = _current().job
    with dynamic_mode():
        results = {
            f"{kind}, {name}, seed {seed}": drive(kind, name, seed, job) for kind, name, seed in json.loads(sys.argv[1])
        }
        sums = {elements: bfloat16(job, elements) for elements in (1, 7, 1003, 3_500_003)}
        half = paddle.ones([3], "float16")
        paddle.distributed.all_reduce(half, group=job.communicators(1)[0])
        sent = {f"int{bits}": sockets(bits) for bits in (8, 4)}
    report(fleet.worker_index(), cases=results, sums=sums, sockets=sent, float16=half.numpy())


KINDS: dict[str, Any] = {"powersgd": POWERSGD, "dgc": DGC, "quantised": QUANTISED}
CASES = [[kind, name, seed] for kind, names in KINDS.items() for seed, name in enumerate(names)]
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(3, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)],
)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    size, folder = request.param, tmp_path_factory.mktemp("compression")
    args = [json.dumps(CASES if size < 4 else [])]
    return run_ranks(Path(__file__), size, folder=folder, args=args, nodes=size, timeout_seconds=280)


def each(result: RanksResult) -> list[tuple[str, list[dict[str, Any]]]]:
    """Each case with what the ranks found."""
    ranks = result.of_all("cases")
    return [(case, [rank[case] for rank in ranks]) for case in ranks[0]]


def test_updates_are_those_of_the_reference_bit_equal_and_go_on_after_a_resume(result: RanksResult) -> None:
    for case, ranks in each(result):
        assert max(rank["difference"] for rank in ranks) < RELATIVE_TOLERANCE, case
        assert len({rank["updates"] for rank in ranks}) == 1, case
        assert [rank["resumed"] for rank in ranks] == [rank["second half"] for rank in ranks], case


def test_full_rank_and_no_compression_are_the_mean_and_the_rest_is_not(result: RanksResult) -> None:
    for case, ranks in each(result):
        if "full rank" in case or "nothing pays" in case:
            assert ranks[0]["is mean"] < RELATIVE_TOLERANCE, case
        else:
            is_small = case.startswith(("powersgd, rank", "dgc"))
            assert ranks[0]["is mean"] > (0.1 if is_small else RELATIVE_TOLERANCE), case


def test_gloo_rounds_every_partial_sum_of_bfloat16(result: RanksResult) -> None:
    for ranks in zip(*(rank.items() for rank in result.of_all("sums")), strict=True):
        for elements, found in ranks:
            assert found["as gloo"], f"{elements} elements"
            assert found["over bound"] <= 1.0, f"{elements} elements"
        assert len({found["bits"] for _, found in ranks}) == 1


def test_gloo_cannot_sum_float16(result: RanksResult) -> None:
    # When this fails, Paddle has learnt it: compression to float16 need not be refused on Gloo any more.
    assert all(np.isinf(rank).all() for rank in result.of_all("float16"))


@pytest.mark.parametrize(("case", "levels"), [("int8", 127), ("int4", 7)])
def test_sockets_send_what_was_planned_and_little_is_owed_in_the_end(
    result: RanksResult, case: str, levels: int
) -> None:
    ranks = [rank[case] for rank in result.of_all("sockets")]
    for rank in ranks:
        assert rank["sent"] == pytest.approx(rank["planned"], rel=0.01)
        assert rank["sent"] < SOCKET_STEPS * 2 * 4 * ELEMENTS / 3
        # Of each member's values and of the owners' sums half a level may be owed; a block's largest value is below 6.
        assert rank["worst"] < 2 * 6 / levels
    assert len({rank["bits"] for rank in ranks}) == 1


if __name__ == "__main__":
    main()
