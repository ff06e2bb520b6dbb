"""Sums on 2 to 5 real ranks: Gloo's of 16 bits as the numpy reference has them, and few bits in bytes as planned.

What compressions compute is compared in `test_strategies.py` and `tests/unit/compression`. The ranks run this file.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import fleet, role_maker
from fleet_train.collectives.engine import CallContext
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import CastAllreduce, cast_on_host, make_allreduces
from fleet_train.collectives.methods.quantised import QuantisedSums
from fleet_train.collectives.methods.registry import Parts
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.convert.fleet import _current
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.pricing import traffic
from fleet_train.plan.simulate_methods import ring_sum_16_bit, to_bfloat16
from fleet_train.profile import Profile
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report


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
        sums = {elements: bfloat16(job, elements) for elements in (1, 7, 1003, 3_500_003)}
        half = paddle.ones([3], "float16")
        paddle.distributed.all_reduce(half, group=job.communicators(1)[0])
        sent = {f"int{bits}": sockets(bits) for bits in (8, 4)}
    report(fleet.worker_index(), sums=sums, sockets=sent, float16=half.numpy())


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(3, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)],
)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    size, folder = request.param, tmp_path_factory.mktemp("compression")
    return run_ranks(Path(__file__), size, folder=folder, nodes=size, timeout_seconds=280)


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
