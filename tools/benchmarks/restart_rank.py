"""A rank of our launcher that trains a small model, saves after every step, resumes, and notes when it does what; for
`restart`. Like users' scripts it imports at its top, which is what a spare process does beforehand.

restart_rank.py NOTES
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import paddle
from paddle import nn, static

from fleet_train import fleet
from tools.benchmarks.restart_notes import STEP_SECONDS, WIDTH, batch, noting


def fleet_rank(folder: Path) -> None:
    note = noting(folder, int(os.environ["PADDLE_TRAINER_ID"]))
    note("imported")
    paddle.enable_static()
    fleet.init()
    note("joined")
    x = static.data("x", [None, WIDTH])
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    loss = (network(x) ** 2).mean()
    fleet.distributed_optimizer(paddle.optimizer.Adam(0.01)).minimize(loss)
    exe = static.Executor()
    exe.run(static.default_startup_program())
    note("converted")
    newest = max((int(each.name[5:]) for each in folder.glob("step-*")), default=0)
    newest = fleet.gather(newest)[0]
    if newest:
        fleet.load_persistables(exe, folder / f"step-{newest}")
    for step in range(newest, 1_000_000):
        exe.run(feed={"x": batch(step, fleet.worker_index())}, fetch_list=[])
        fleet.save_persistables(exe, folder / f"draft-{step + 1}")
        if fleet.is_first_worker():
            (folder / f"draft-{step + 1}").rename(folder / f"step-{step + 1}")
            if step > 2:
                old = folder / f"step-{step - 2}"
                for each in old.iterdir():
                    each.unlink()
                old.rmdir()
        note(step)
        time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    fleet_rank(Path(sys.argv[1]))
