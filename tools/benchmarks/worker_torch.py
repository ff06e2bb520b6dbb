"""A rank of PyTorch: DistributedDataParallel with one of its hooks, or alone. argv: assignment, rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from tools.benchmarks.contestants import ALONE, parse
from tools.benchmarks.hooks import Hook
from tools.benchmarks.loop import Assignment, run
from tools.benchmarks.task import Weights
from tools.benchmarks.torch_network import network, weights_of

# DDP takes bf16_compress_hook on NCCL only and knows it by its name; Gloo sums bfloat16 as well.
_BF16_COMPRESS = lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)  # noqa: E731


def _bucket_size(hook: Hook) -> dict[str, int]:
    if hook.kind == "powersgd":
        # The hook's collectives of two buckets overtake each other on Gloo, and the job aborts: all in one bucket.
        return {"bucket_cap_mb": 1024}
    return {"bucket_cap_mb": hook.bucket_mb} if hook.bucket_mb else {}


class TorchTrainee:
    def __init__(self, assignment: Assignment) -> None:
        contestant, task = parse(assignment.contestant), assignment.task
        self._network = network(task)
        self._optimizer: Any = torch.optim.SGD(
            self._network.parameters(), lr=task.learning_rate, momentum=task.momentum
        )
        self._model: Any = self._network
        self._hook = Hook.of("ddp" if contestant.kind == ALONE else contestant.variant, assignment.start_iteration)
        if contestant.kind != ALONE:
            self._distribute(self._hook, assignment)

    def _distribute(self, hook: Hook, assignment: Assignment) -> None:
        model = self._model = DistributedDataParallel(self._network, **_bucket_size(hook))
        if hook.kind == "bf16":
            model.register_comm_hook(None, _BF16_COMPRESS)
        elif hook.kind == "powersgd":
            state = power_sgd.PowerSGDState(None, matrix_approximation_rank=hook.number, start_powerSGD_iter=hook.start)
            model.register_comm_hook(state, power_sgd.powerSGD_hook)
        elif hook.kind == "post_local_sgd":
            inside_node, _ = dist.new_subgroups(assignment.ranks_per_node)
            state = local_sgd.PostLocalSGDState(None, inside_node, start_localSGD_iter=hook.start)
            model.register_comm_hook(state, local_sgd.post_localSGD_hook)
            averager = PeriodicModelAverager(period=hook.number, warmup_steps=hook.start)
            self._optimizer = PostLocalSGDOptimizer(self._optimizer, averager)

    def step(self, features: Any, labels: Any) -> float:
        loss = torch.nn.functional.cross_entropy(self._model(torch.from_numpy(features)), torch.from_numpy(labels))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def weights(self) -> Weights:
        return weights_of(self._network.ordered())

    def facts(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "threads": torch.get_num_threads(), **self._hook.rhythm()}


def main() -> None:
    assignment, rank = Assignment.read(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    is_alone = parse(assignment.contestant).kind == ALONE
    if not is_alone:
        dist.init_process_group("gloo")  # MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
    run(TorchTrainee(assignment), assignment, rank)
    if not is_alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
