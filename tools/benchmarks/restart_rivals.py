"""A rank of torchrun or Ray Train that does what `restart_rank` does.

restart_rivals.py torch|ray NOTES RANKS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from tools.benchmarks.restart_notes import STEP_SECONDS, WIDTH, Note, batch, noting


def torch_rank(folder: Path, rank: int, note: Note) -> None:
    """In an initialised process group of Gloo."""
    network = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
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
        time.sleep(STEP_SECONDS)


def under_torchrun(folder: Path) -> None:
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
    {"torch": under_torchrun, "ray": under_ray}[sys.argv[1]](Path(sys.argv[2]))
