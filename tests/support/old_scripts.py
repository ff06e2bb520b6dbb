"""The four scripts of the 2020 recipe's guides, with their strategies as written today, one after another."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import paddle

from fleet_train import DistributedStrategy, fleet, role_maker
from tests.support.worker import digest, report

STEPS = 8


def performance_tuned() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.nccl_comm_num = 2
    strategy.exec_strategy.num_threads = strategy.nccl_comm_num + 1
    strategy.exec_strategy.num_iteration_per_drop_scope = 30
    strategy.fuse_all_reduce_ops = True
    return strategy


def local_sgd() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.use_local_sgd = True
    strategy.local_sgd_is_warm_steps = 4
    strategy.local_sgd_steps = 2
    return strategy


def hierarchical() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.use_hierarchical_allreduce = True
    strategy.hierarchical_allreduce_inter_nranks = 2
    return strategy


def fused_16_megabytes() -> DistributedStrategy:
    os.environ["FLAGS_fuse_parameter_memory_size"] = "16"
    os.environ["FLAGS_fuse_parameter_groups_size"] = "50"
    return DistributedStrategy()


def train(strategy: DistributedStrategy) -> dict[str, Any]:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [None, 32], "float32")
        y = paddle.static.data("y", [None, 1], "int64")
        hidden = paddle.static.nn.fc(paddle.static.nn.fc(x, 128, activation="tanh"), 128, activation="tanh")
        cost = paddle.nn.functional.cross_entropy(paddle.static.nn.fc(hidden, 2), y)
        optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.01), strategy=strategy)
        optimizer.minimize(cost, startup)
    exe = paddle.static.Executor(fleet.place())
    exe.run(startup)
    random = np.random.default_rng(fleet.worker_index())
    for _ in range(STEPS):
        features = random.standard_normal((8, 32), dtype="float32")
        labels = (features.sum(axis=1, keepdims=True) > 0).astype("int64")
        exe.run(fleet.main_program, feed={"x": features, "y": labels}, fetch_list=[cost])
    plan = fleet.plan()
    assert plan is not None
    return {
        "digest": digest(main.state_dict("param", paddle.static.global_scope())),
        "communicators": plan.communicators,
        "group_size": plan.group_size,
        "period": plan.averaging.period if plan.averaging else 0,
        "bucket_MB": fleet.profile().fuse_grad_size_in_MB,
    }


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
scripts = (performance_tuned, local_sgd, hierarchical, fused_16_megabytes)
report(fleet.worker_index(), **{script.__name__: train(script()) for script in scripts})
fleet.shutdown()
