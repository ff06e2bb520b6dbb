"""One process: the converted program is the one that Paddle's own optimizer makes."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

SCRIPT = """
import re

import numpy as np
import paddle
from fleet_train import DistributedStrategy, fleet, role_maker
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
report(same=same, world=fleet.worker_num(), sum=fleet.all_reduce(np.array([2.5])), plan=fleet.plan())
fleet.barrier_worker()
"""


def test_program_of_one_process_is_left_as_it_is(tmp_path: Path) -> None:
    result = run_ranks(SCRIPT, 1, nodes=0, folder=tmp_path)
    assert result.values[0]["same"] == [[True, True, True]] * 3
    assert result.values[0]["world"] == 1
    assert result.values[0]["sum"].tolist() == [2.5]
    assert result.values[0]["plan"] is None
