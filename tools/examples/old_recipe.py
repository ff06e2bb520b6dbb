"""The performance settings that Fleet's users know from 2020, on the recipe's network.

With the argument ``stock`` they are set on paddle.distributed.fleet.DistributedStrategy, which today's Paddle silently
ignores; fleet_train carries them out, or reports on rank 0 what replaces them.
"""

import sys
from typing import Any

import numpy as np
import paddle

from fleet_train import DistributedStrategy, fleet, role_maker

COMMUNICATORS = 2  # the advice of 2020: 2 on several nodes, 1 on one
FETCH_EVERY = 2  # a fetch of the loss waits for the step


def our_strategy() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.nccl_comm_num = COMMUNICATORS
    strategy.fuse_all_reduce_ops = True
    strategy.fuse_grad_size_in_MB = 16
    strategy.exec_strategy.num_threads = COMMUNICATORS + 1
    strategy.exec_strategy.num_iteration_per_drop_scope = 30
    return strategy


def stock_strategy() -> Any:
    strategy = paddle.distributed.fleet.DistributedStrategy()
    strategy.nccl_comm_num = COMMUNICATORS
    strategy.fuse_all_reduce_ops = True
    strategy.fuse_grad_size_in_MB = 16
    return strategy


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))

paddle.seed(2020)
x = paddle.static.data("x", [None, 32], "float32")
y = paddle.static.data("y", [None, 1], "int64")
hidden = paddle.static.nn.fc(x, size=1280, activation="tanh")
hidden = paddle.static.nn.fc(hidden, size=1280, activation="tanh")
prediction = paddle.static.nn.fc(hidden, size=2, activation="softmax")
cost = paddle.nn.functional.cross_entropy(prediction, y, use_softmax=False)

strategy = stock_strategy() if "stock" in sys.argv else our_strategy()
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(learning_rate=0.01), strategy)
optimizer.minimize(cost)

exe = paddle.static.Executor(fleet.place())
exe.run(paddle.static.default_startup_program())

random = np.random.default_rng(seed=fleet.worker_index())
for step in range(100):
    samples = random.standard_normal((128, 32), dtype="float32")
    labels = (samples.sum(axis=1, keepdims=True) > 0).astype("int64")
    fetch = [cost] if step % FETCH_EVERY == 0 else []
    fetched = exe.run(fleet.main_program, feed={"x": samples, "y": labels}, fetch_list=fetch)
    if fetched:
        print(f"step{step} cost={fetched[0].item():f}")

fleet.save_persistables(exe, "output/mlp")
