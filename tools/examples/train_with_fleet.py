"""The recipe's network on one card: two tanh layers of 1280, softmax over 2 classes, 100 steps of SGD.

train_with_fleet.py is this script on many machines; the README shows the difference.
"""

import os

import numpy as np
import paddle

from fleet_train import DistributedStrategy, fleet, role_maker

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))

paddle.seed(2020)
x = paddle.static.data("x", [None, 32], "float32")
y = paddle.static.data("y", [None, 1], "int64")
hidden = paddle.static.nn.fc(x, size=1280, activation="tanh")
hidden = paddle.static.nn.fc(hidden, size=1280, activation="tanh")
prediction = paddle.static.nn.fc(hidden, size=2, activation="softmax")
cost = paddle.nn.functional.cross_entropy(prediction, y, use_softmax=False)

optimizer = paddle.optimizer.SGD(learning_rate=0.01)
optimizer = fleet.distributed_optimizer(optimizer, DistributedStrategy.from_profile("multi_node"))
optimizer.minimize(cost)

on_gpu = paddle.is_compiled_with_cuda()
place = paddle.CUDAPlace(int(os.getenv("FLAGS_selected_gpus", "0"))) if on_gpu else paddle.CPUPlace()
exe = paddle.static.Executor(place)
exe.run(paddle.static.default_startup_program())

random = np.random.default_rng(seed=fleet.worker_index())
for step in range(100):
    samples = random.standard_normal((128, 32), dtype="float32")
    labels = (samples.sum(axis=1, keepdims=True) > 0).astype("int64")
    (cost_now,) = exe.run(feed={"x": samples, "y": labels}, fetch_list=[cost])
    print(f"step{step} cost={cost_now.item():f}")

fleet.save_persistables(exe, "output/mlp")
