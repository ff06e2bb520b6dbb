"""One process: the converted program is the one of Paddle's own optimizer, unless the profile asks for a pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

SCRIPT = """
import re

import numpy as np
import paddle
from fleet_train import DistributedStrategy, fleet, role_maker
from fleet_train.profile import Profile
from tests.support.worker import report

paddle.enable_static()


def program(wrap, make):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", [None, 4], "float32")
        hidden = paddle.tanh(paddle.nn.Linear(4, 8)(x))  # static.nn.fc numbers its names on, guard or not
        loss = paddle.mean(paddle.nn.Linear(8, 1)(hidden))
        wrap(make()).minimize(loss, startup)
    # struct_name counts layers over the whole process, guard or not
    return re.sub(r'struct_name:"[^"]*"', '', str(main)), str(startup), main


def makers():
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    yield lambda: paddle.optimizer.SGD(0.1)
    yield lambda: paddle.optimizer.Momentum(paddle.optimizer.lr.StepDecay(0.1, 3), 0.9, weight_decay=0.01)
    yield lambda: paddle.optimizer.AdamW(0.1, grad_clip=clip)


fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
same = []
for make in makers():
    plain = program(lambda optimizer: optimizer, make)
    wrapped = program(lambda optimizer: fleet.distributed_optimizer(optimizer, DistributedStrategy()), make)
    same.append([plain[0] == wrapped[0], plain[1] == wrapped[1], fleet.main_program is wrapped[2]])
def momentum():
    return paddle.optimizer.Momentum(0.1, 0.9)


def is_left(**settings):
    profile = Profile(**settings)
    plain = program(lambda optimizer: optimizer, momentum)
    wrapped = program(lambda optimizer: fleet.distributed_optimizer(optimizer, profile), momentum)
    return wrapped[:2] == plain[:2]


left = {
    "accumulate_steps": is_left(accumulate_steps=2),
    "amp_level": is_left(amp_level="O1"),
    "recompute_segments": is_left(recompute_segments=2),
    "recompute_every_blocks": is_left(recompute_every_blocks=1),
    "recompute_checkpoints": is_left(recompute_checkpoints=["linear_1.w_0"]),
    "use_local_sgd": is_left(use_local_sgd=True),
    "compression": is_left(compression="dgc"),
    "sync_batch_norm": is_left(sync_batch_norm=True),
    "nccl_comm_num": is_left(nccl_comm_num=4, sync_nccl_allreduce=True, divergence_check_steps=1),
}
report(left=left, same=same, world=fleet.worker_num(), sum=fleet.all_reduce(np.array([2.5])), plan=fleet.plan())
fleet.barrier_worker()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(SCRIPT, 1, nodes=0, folder=tmp_path_factory.mktemp("one_process")).values[0]


def test_program_of_one_process_is_left_as_it_is(found: dict[str, Any]) -> None:
    assert found["same"] == [[True, True, True]] * 3
    assert found["world"] == 1
    assert found["sum"].tolist() == [2.5]
    assert found["plan"] is None


def test_what_asks_for_another_computation_is_heeded_by_one_process_and_what_sends_changes_nothing(
    found: dict[str, Any],
) -> None:
    assert found["left"] == {
        "accumulate_steps": False,
        "amp_level": False,
        "recompute_segments": False,
        "recompute_every_blocks": False,
        "recompute_checkpoints": False,
        "use_local_sgd": True,
        "compression": True,
        "sync_batch_norm": True,
        "nccl_comm_num": True,
    }
