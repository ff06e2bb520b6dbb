"""The ``train.py`` of launch tests: join, train five steps, report rank and parameters.

Every rank starts from a seed of its own and sees data of its own: equal digests at the end are the work of fleet.
"""

import os

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from tests.support.worker import digest, report

at_import = [os.environ.get("PADDLE_TRAINER_ID"), os.environ.get("PADDLE_TRAINERS_NUM")]
paddles = [paddle.distributed.get_rank(), paddle.distributed.get_world_size()]
paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
rank = fleet.worker_index()
paddle.seed(100 + rank)

x = paddle.static.data("x", [None, 8], "float32")
y = paddle.static.data("y", [None, 1], "float32")
hidden = paddle.static.nn.fc(x, size=16, activation="tanh")
loss = paddle.mean((paddle.static.nn.fc(hidden, size=1) - y) ** 2)
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy=None)
optimizer.minimize(loss)

exe = paddle.static.Executor(fleet.place())
exe.run(paddle.static.default_startup_program())
random = np.random.default_rng(rank)
for _ in range(5):
    samples = random.standard_normal((4, 8), dtype="float32")
    feed = {"x": samples, "y": samples.sum(axis=1, keepdims=True)}
    exe.run(fleet.main_program, feed=feed, fetch_list=[loss])

state = paddle.static.default_main_program().state_dict("param", paddle.static.global_scope())
report(
    world_size=fleet.worker_num(),
    node_num=fleet.node_num(),
    at_import=at_import,
    paddles=paddles,
    endpoints=fleet.worker_endpoints(),
    digest=digest(state),
)
print(f"rank {rank} of {fleet.worker_num()} has trained")
fleet.shutdown()
