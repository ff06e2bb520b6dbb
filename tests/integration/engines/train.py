"""A script as users write it: the changed lines, its own checkpoints, and nothing about the engine.

FLEET_TEST_KILL=<step> kills rank 1 once, after that step. FLEET_TEST_STEP_SECONDS makes a first run's
steps last longer.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.errors import Preempted

STEPS, SAVE_EVERY = 20, 5
CHECKPOINTS = Path("checkpoints")
KILLED = Path("killed")


def newest() -> int:
    steps = [int(folder.name) for folder in CHECKPOINTS.glob("[0-9]*")]
    return int(fleet.gather(max(steps, default=0))[0])


def save(step: int) -> None:
    fleet.save_persistables(exe, CHECKPOINTS / "draft")
    if fleet.is_first_worker():
        os.replace(CHECKPOINTS / "draft", CHECKPOINTS / str(step))


def kill_once(step: int) -> None:
    if str(step) == os.environ.get("FLEET_TEST_KILL") and fleet.worker_index() == 1 and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
signal.signal(signal.SIGTERM, lambda *_: fleet.request_stop("SIGTERM"))
paddle.seed(2020)
x, y = paddle.static.data("x", [None, 16], "float32"), paddle.static.data("y", [None, 1], "float32")
hidden = paddle.static.nn.fc(x, size=32, activation="tanh")
loss = paddle.mean((paddle.static.nn.fc(hidden, size=1) - y) ** 2)
fleet.distributed_optimizer(paddle.optimizer.Momentum(learning_rate=0.01)).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(fleet.startup_program)

first = newest()
if first:
    fleet.load_persistables(exe, CHECKPOINTS / str(first))
place = f"rank {fleet.worker_index()} of {fleet.worker_num()} on {fleet.node_num()} nodes"
print(f"{place} goes on after step {first}", flush=True)
for step in range(first + 1, STEPS + 1):
    samples = np.random.default_rng([fleet.worker_index(), step]).standard_normal((8, 16), dtype="float32")
    feed = {"x": samples, "y": samples.sum(axis=1, keepdims=True)}
    exe.run(fleet.main_program, feed=feed, fetch_list=[loss])
    why = fleet.stop_requested()
    if why or step % SAVE_EVERY == 0:
        save(step)
    if why:
        raise Preempted(f"{why}; checkpoint {step} is saved")
    kill_once(step)
    time.sleep(0.0 if first else float(os.environ.get("FLEET_TEST_STEP_SECONDS", 0.0)))
