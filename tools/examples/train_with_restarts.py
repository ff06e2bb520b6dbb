"""A custom training loop that survives restarts: it saves, resumes from its newest checkpoint, and stops on request.

fleet_train launch --nproc_per_node=2 --max_restarts=3 tools/examples/train_with_restarts.py
"""

import numpy as np
import paddle

from fleet_train import fleet, role_maker

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))

paddle.seed(2020)
np.random.seed(fleet.worker_index())
x, y = paddle.static.data("x", [None, 32], "float32"), paddle.static.data("y", [None, 1], "float32")
hidden = paddle.static.nn.fc(x, size=64, activation="tanh")
loss = paddle.mean((paddle.static.nn.fc(hidden, size=1) - y) ** 2)
fleet.distributed_optimizer(paddle.optimizer.Momentum(learning_rate=0.01)).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(fleet.startup_program)

run = fleet.resumable("ck", exe)
for step in run.steps(1000, save_every=100):
    samples = np.random.standard_normal((64, 32)).astype("float32")
    labels = samples.sum(axis=1, keepdims=True)
    (now,) = exe.run(fleet.main_program, feed={"x": samples, "y": labels}, fetch_list=[loss])
    print(f"step{step} loss={now.item()!r}")
