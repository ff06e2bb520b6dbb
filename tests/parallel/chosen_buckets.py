"""Run as ranks: programs without bucket sizes in the profile, large enough to cut, on a measured link. argv: ranks."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.plan.explain import explain
from fleet_train.profile import Profile
from tests.support.worker import digest, report

SHAPE, WEIGHTS, STEPS = (320, 400), 5, 2
PROFILES: dict[str, dict[str, Any]] = {
    "open": {},
    "size given": {"fuse_grad_size_in_MB": 0.75},
    "bfloat16": {"compression": "bf16"},
    "all given": {"nccl_comm_num": 2, "fuse_grad_size_in_MB": 1, "last_comm_group_size_MB": 0.5},
}


def gradient(rank: int, index: int, step: int) -> Any:
    """What is fed for a weight: its gradient. Small whole numbers, so that sums are exact in bfloat16, too."""
    return np.random.default_rng([rank, index, step]).integers(-8, 9, SHAPE).astype("float32")


def run(profile: Profile) -> dict[str, Any]:
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    said = io.StringIO()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        terms = []
        for index in range(WEIGHTS):
            zero = nn.initializer.Constant(0.0)
            weight = paddle.static.create_parameter(SHAPE, "float32", name=f"w{index}", default_initializer=zero)
            terms.append(paddle.sum(weight * paddle.static.data(f"x{index}", SHAPE, "float32")))
        with contextlib.redirect_stderr(said):
            fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), profile).minimize(paddle.add_n(terms), startup)
    executor, ranks, rank = paddle.static.Executor(fleet.place()), fleet.worker_num(), fleet.worker_index()
    expected = [np.zeros(SHAPE) for _ in range(WEIGHTS)]
    with paddle.static.scope_guard(scope):
        executor.run(startup)
        for step in range(STEPS):
            executor.run(main, feed={f"x{index}": gradient(rank, index, step) for index in range(WEIGHTS)})
            for index in range(WEIGHTS):
                expected[index] -= np.mean([gradient(other, index, step) for other in range(ranks)], axis=0)
        found = [np.array(scope.find_var(f"w{index}").get_tensor()) for index in range(WEIGHTS)]
    plan = fleet.plan()
    assert plan is not None
    return {
        "chosen": plan.chosen,
        "plan": plan.digest,
        "buckets": len(plan.buckets),
        "explained": explain(plan),
        "said": [line for line in said.getvalue().splitlines() if "chosen" in line],
        "error": max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True)),
        "weights": digest({str(index): value for index, value in enumerate(found)}),
    }


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    report(fleet.worker_index(), cases={name: run(Profile(**knobs)) for name, knobs in PROFILES.items()})


if __name__ == "__main__":
    main()
