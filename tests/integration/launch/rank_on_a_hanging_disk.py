"""Run as ranks by test_hanging_disk: saves while rank 0's disk hangs; the first argument says when that is noticed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState


def hangs(*_: object) -> Path:
    os.mkfifo("pipe")
    Path("pipe").read_bytes()  # nobody writes to it
    raise AssertionError


def main(when: str) -> None:
    paddle.enable_static()
    fleet.init()
    x = paddle.static.data("x", [8, 4])
    loss = paddle.mean(paddle.static.nn.fc(x, 1) ** 2)
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
    exe = paddle.static.Executor(fleet.place())
    exe.run(fleet.startup_program)
    storage.publish = hangs
    checkpoints = Checkpoints(Path("run"), background=when != "at once", timeout_seconds=3.0)
    for step in (1, 2):
        exe.run(fleet.main_program, feed={"x": np.ones((8, 4), "float32")}, fetch_list=[loss])
        if step == 1 or when == "next save":
            checkpoints.save(exe, TrainState(0, step, 2, 2, {}, {}, {}, {}))
    if when == "script's end":
        raise ValueError("the script ends for another reason")
    checkpoints.finish()
    print("not reached", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
