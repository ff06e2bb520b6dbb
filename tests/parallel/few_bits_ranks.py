"""Run as ranks by test_few_bits: quantised gradients between any number of ranks, and what their sockets send."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import time
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.collectives.engine import CallContext
from fleet_train.collectives.methods.dense import make_allreduces
from fleet_train.collectives.methods.quantised import QuantisedSums
from fleet_train.collectives.methods.registry import Parts
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.convert.fleet import _current
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.pricing import traffic
from fleet_train.profile import Profile
from tests.support.worker import digest, report

ELEMENTS = 1_000_003
STEPS = 4
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


def gradients(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).standard_normal(ELEMENTS).astype("float32")


def run(bits: int) -> dict[str, Any]:
    job, rank = _current().job, fleet.worker_index()
    profile = Profile(compression=f"int{bits}", fuse_grad_size_in_MB=64.0, nccl_comm_num=1)
    plan = build_plan([TensorSpec("w", (ELEMENTS,), "float32")], job.cluster, profile)
    allreduces = make_allreduces(job, 1, 0)
    began = time.monotonic()
    sums = QuantisedSums(job, plan, allreduces)
    formed = time.monotonic() - began
    method = Parts(plan.buckets[0], job, plan, profile, allreduces[0], quantised=sums).make()
    job.barrier(f"groups of int{bits} formed")
    results, total, before = [], np.zeros(ELEMENTS), bytes_sent()
    for step in range(STEPS):
        local = paddle.to_tensor(gradients(step, rank))
        results.append(
            job.engine.start(method.average([local]), CallContext(f"step {step}", "a bucket")).result()[0].numpy()
        )
        total += np.mean([gradients(step, other) for other in range(job.world_size)], axis=0)
    job.barrier(f"sums of int{bits} received")  # what a rank has handed to its sockets is on its way until then
    sent = bytes_sent() - before
    planned = traffic(plan, job.cluster)
    own = [value[rank] for value in (planned.sent, planned.protocol)]
    return {
        "bits": digest({f"{step}": value for step, value in enumerate(results)}),
        "sent": sent,
        "planned": STEPS * sum(own),
        "worst": float(np.abs(np.sum(results, axis=0) - total).max()),
        "seconds": round(formed, 2),
    }


if __name__ == "__main__":
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    with dynamic_mode():
        cases = {f"int{bits}": run(bits) for bits in (8, 4)}
    report(fleet.worker_index(), cases=cases)
    sys.exit(0)
