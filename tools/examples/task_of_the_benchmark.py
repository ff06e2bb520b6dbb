"""A task of the benchmark as a user's training script, for `recommend`, which ends it after a few steps.

python -m fleet_train recommend --script tools/examples/task_of_the_benchmark.py mlp
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import paddle

from fleet_train import fleet, role_maker
from tools.benchmarks.paddle_network import network, start_feed
from tools.benchmarks.task import TASKS, Batches

STEPS = 2000


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    task = TASKS[sys.argv[1]]
    features = paddle.static.data("features", [None, *task.sample_shape], "float32")
    labels = paddle.static.data("labels", [None], "int64")
    loss = paddle.nn.functional.cross_entropy(network(task)(features), labels)
    fleet.distributed_optimizer(paddle.optimizer.Momentum(task.learning_rate, task.momentum)).minimize(loss)
    executor = paddle.static.Executor(fleet.place())
    executor.run(fleet.startup_program, feed=start_feed(task, fleet.startup_program))
    batches = Batches(task, fleet.worker_index(), fleet.worker_num())
    for step in range(STEPS):
        images, classes = batches.at(step)
        executor.run(fleet.main_program, feed={"features": images, "labels": classes}, fetch_list=[loss])


if __name__ == "__main__":
    main()
