"""A custom training loop that survives restarts: saves complete checkpoints, resumes from the newest, stops on request.

python -m fleet_train launch --nproc_per_node=2 --max_restarts=3 tools/examples/train_with_restarts.py
"""

import os
import signal
from pathlib import Path

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.errors import Preempted

STEPS, SAVE_EVERY = 1000, 100
CHECKPOINTS = Path("checkpoints")


def newest() -> int:
    """The step of the newest checkpoint, 0 without one. All ranks use rank 0's answer."""
    steps = [int(folder.name) for folder in CHECKPOINTS.glob("[0-9]*")]
    return int(fleet.gather(max(steps, default=0))[0])


def save(step: int) -> None:
    """Only a complete checkpoint gets a number: a rank may be killed while rank 0 writes."""
    fleet.save_persistables(exe, CHECKPOINTS / "draft")
    if fleet.is_first_worker():
        os.replace(CHECKPOINTS / "draft", CHECKPOINTS / str(step))


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
signal.signal(signal.SIGTERM, lambda *_: fleet.request_stop("SIGTERM"))

paddle.seed(2020)
x, y = paddle.static.data("x", [None, 32], "float32"), paddle.static.data("y", [None, 1], "float32")
hidden = paddle.static.nn.fc(x, size=64, activation="tanh")
loss = paddle.mean((paddle.static.nn.fc(hidden, size=1) - y) ** 2)
fleet.distributed_optimizer(paddle.optimizer.Momentum(learning_rate=0.01)).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(fleet.startup_program)

first = newest()
if first:
    fleet.load_persistables(exe, CHECKPOINTS / str(first))
    print(f"resumes after step {first}")
for step in range(first + 1, STEPS + 1):
    # The data depend only on rank and step, so a repeated step is the same step.
    samples = np.random.default_rng([fleet.worker_index(), step]).standard_normal((64, 32), dtype="float32")
    labels = samples.sum(axis=1, keepdims=True)
    (now,) = exe.run(fleet.main_program, feed={"x": samples, "y": labels}, fetch_list=[loss])
    print(f"step{step} loss={now.item()!r}")
    why = fleet.stop_requested()  # the same answer on every rank
    if why or step % SAVE_EVERY == 0:
        save(step)
    if why:
        raise Preempted(f"{why}; checkpoint {step} is saved")
