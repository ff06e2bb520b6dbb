"""A rank that trains a small model, saves after every step, resumes, and notes when it does what; for `restart`.

restart_rank.py fleet|torch|ray NOTES
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_WIDTH, _BATCH, _STEP_SECONDS = 256, 16, 0.1
Note = Callable[[Any], None]


def noting(folder: Path, rank: int) -> Note:
    """What notes a step's number, or another event, with the time on the clock of all processes."""
    path = folder / f"notes.{rank}"

    def note(what: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps([what, time.monotonic(), os.getpid()]) + "\n")

    return note


def batch(step: int, rank: int) -> Any:
    return np.random.default_rng([step, rank]).standard_normal((_BATCH, _WIDTH)).astype("float32")


def fleet_rank(folder: Path) -> None:
    import paddle
    from paddle import nn, static

    from fleet_train import fleet

    note = noting(folder, int(os.environ["PADDLE_TRAINER_ID"]))
    note("imported")
    paddle.enable_static()
    fleet.init()
    note("joined")
    x = static.data("x", [None, _WIDTH])
    network = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))
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
        time.sleep(_STEP_SECONDS)


def torch_rank(folder: Path, rank: int, note: Note) -> None:
    """In an initialised process group of Gloo."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    network = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh(), torch.nn.Linear(_WIDTH, 1))
    )
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    note("converted")
    begin = 0
    if (folder / "saved").exists():
        saved = torch.load(folder / "saved", weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    for step in range(begin, 1_000_000):
        optimizer.zero_grad()
        (network(torch.from_numpy(batch(step, rank))) ** 2).mean().backward()
        optimizer.step()
        if rank == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "draft")
            os.replace(folder / "draft", folder / "saved")
        torch.distributed.barrier()
        note(step)
        time.sleep(_STEP_SECONDS)


def under_torchrun(folder: Path) -> None:
    import torch

    rank = int(os.environ["RANK"])
    note = noting(folder, rank)
    note("imported")
    torch.distributed.init_process_group("gloo")
    note("joined")
    torch_rank(folder, rank, note)


def under_ray(folder: Path) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def in_worker() -> None:
        rank = ray.train.get_context().get_world_rank()
        note = noting(folder, rank)
        note("imported")
        note("joined")
        torch_rank(folder, rank, note)

    ray.init(num_cpus=int(sys.argv[3]), include_dashboard=False, log_to_driver=False)
    run = RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=-1))
    TorchTrainer(in_worker, scaling_config=ScalingConfig(num_workers=int(sys.argv[3])), run_config=run).fit()


if __name__ == "__main__":
    {"fleet": fleet_rank, "torch": under_torchrun, "ray": under_ray}[sys.argv[1]](Path(sys.argv[2]))
