"""Buckets on real ranks: sizes are measured and agreed on, and averages are exact. The ranks run this file, too."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.plan.explain import explain
from fleet_train.profile import Profile
from tests.support.ranks import run_ranks
from tests.support.worker import digest, report

SHAPE, WEIGHTS, STEPS = (320, 400), 5, 2
# Large enough to cut, without bucket sizes in the profile.
PROFILES: dict[str, dict[str, Any]] = {
    "open": {},
    "size given": {"fuse_grad_size_in_MB": 0.75},
    "bfloat16": {"compression": "bf16"},
    "all given": {"nccl_comm_num": 2, "fuse_grad_size_in_MB": 1, "last_comm_group_size_MB": 0.5},
}


def gradient(rank: int, index: int, step: int) -> Any:
    """What is fed for a weight: its gradient. Small whole numbers, so that sums are exact in bfloat16, too."""
    return np.random.default_rng([rank, index, step]).integers(-8, 9, SHAPE).astype("float32")


def choose(profile: Profile) -> dict[str, Any]:
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
    report(
        fleet.worker_index(),
        chosen={name: choose(Profile(average_over="ranks", **knobs)) for name, knobs in PROFILES.items()},
    )


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(Path(__file__), 2, folder=tmp_path_factory.mktemp("buckets"), nodes=2).of_all("chosen")


@pytest.mark.parametrize("name", PROFILES)
def test_all_ranks_carry_out_the_choice_that_rank_0_tells_and_averages_are_exact(ranks: Ranks, name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    assert (first["plan"], first["weights"]) == (second["plan"], second["weights"])
    # bfloat16 sums whole numbers exactly.
    assert max(first["error"], second["error"]) < 1e-5
    given = PROFILES[name].keys()
    left = [knob for knob in ("nccl_comm_num", "fuse_grad_size_in_MB", "last_comm_group_size_MB") if knob not in given]
    assert re.findall(r"(\w+): [0-9.]+", first["chosen"]) == left
    # 0.49 MB each: two in a bucket of 1 MB, the first and last alone.
    assert first["buckets"] == {"size given": 5, "all given": 4}.get(name, first["buckets"])
    assert second["said"] == []
    if left and name != "bfloat16":
        (sentence,) = first["said"]
        told = r"chosen for [0-9.e+]+ Gb/s, [0-9.e-]+ ms \(measured\) and 2.44 MB of gradients, which makes"
        assert re.match(f"fleet_train: {re.escape(first['chosen'])}: {told} {first['buckets']} bucket", sentence)
        assert "(measured))" in first["explained"]


if __name__ == "__main__":
    main()
