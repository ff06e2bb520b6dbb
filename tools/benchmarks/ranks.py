"""A rank of the benchmark of strategies. argv: assignment, and the rank where no launcher of ours gives it.

As a script for ``recommend`` (argv: ``task``, its name) it trains a task of the benchmarks until it is ended.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import fleet_train  # of the checkout that PYTHONPATH names, which may be another than this file's

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tools.benchmarks.contestants import ALONE, TORCH, Hook, parse
from tools.benchmarks.loop import Assignment, run
from tools.benchmarks.networks import (
    TASKS,
    Batches,
    PaddleKit,
    Task,
    TorchKit,
    Weights,
    build,
    start_feed,
    start_weights,
    torch_tensors,
)


class OurTrainee:
    """A static program and the changed lines; the profile is the launcher's --strategy."""

    def __init__(self, task: Task, nodes: int, ranks_per_node: int) -> None:
        import paddle

        from fleet_train import fleet, role_maker

        paddle.enable_static()
        fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
        self.rank, self._shape = fleet.worker_index(), (nodes, ranks_per_node)
        features = paddle.static.data("features", [None, *task.sample_shape], "float32")
        labels = paddle.static.data("labels", [None], "int64")
        self._network = build(task, PaddleKit(task))
        self._loss = paddle.nn.functional.cross_entropy(self._network(features), labels)
        fleet.distributed_optimizer(paddle.optimizer.Momentum(task.learning_rate, task.momentum)).minimize(self._loss)
        self._executor, self._scope = paddle.static.Executor(fleet.place()), paddle.static.global_scope()
        self._executor.run(fleet.startup_program, feed=start_feed(task, fleet.startup_program))
        self._fleet = fleet

    def step(self, features: Any, labels: Any) -> float:
        feed = {"features": features, "labels": labels}
        (loss,) = self._executor.run(self._fleet.main_program, feed=feed, fetch_list=[self._loss])
        return float(loss.item())

    def weights(self) -> Weights:
        names = [parameter.name for parameter in self._network.parameters()]
        return [np.array(self._scope.find_var(name).get_tensor()) for name in names]

    def facts(self) -> dict[str, Any]:
        from fleet_train.cluster import Cluster
        from fleet_train.plan.pricing import traffic

        plan, profile = self._fleet.plan(), self._fleet.profile()
        explicit = profile.model_dump(mode="json", include=set(profile.explicit))
        facts = {"profile": explicit, **rhythm(profile.model_dump(mode="json"))}
        if plan is None:
            return facts
        return facts | {
            "predicted_bytes_per_step": plan.sent_bytes_per_step,
            "predicted_link_bytes_per_step": fmean(traffic(plan, Cluster.imagined(*self._shape)).leaving),
            "collectives_per_step": plan.collectives_per_step,
            "gradient_bytes": plan.gradient_bytes,
            "gradients": [[g.name, g.shape, g.dtype] for bucket in plan.buckets for g in bucket.gradients],
        }


def rhythm(profile: Mapping[str, Any]) -> dict[str, int]:
    """Warm-up steps of a profile, and the period with which its steps repeat after them."""
    if profile["use_local_sgd"]:
        is_constant = profile["local_sgd_schedule"] == "constant"
        return {
            "settles_after": profile["local_sgd_is_warm_steps"],
            "period_steps": profile["local_sgd_steps"] if is_constant else profile["local_sgd_max_steps"],
        }
    settles = {"powersgd": profile["powersgd_start_step"]}
    settles["dgc"] = profile["dgc_rampup_begin_step"] + profile["dgc_rampup_steps"]
    return {"settles_after": settles.get(profile["compression"], 0), "period_steps": profile["accumulate_steps"]}


class TorchTrainee:
    """PyTorch: DistributedDataParallel with one of its hooks, or alone."""

    def __init__(self, assignment: Assignment) -> None:
        import torch

        torch.set_num_threads(1)
        contestant, task = parse(assignment.contestant), assignment.task
        self._torch, self._network = torch, build(task, TorchKit())
        for tensor, value in zip(torch_tensors(self._network), start_weights(task), strict=True):
            tensor.copy_(torch.from_numpy(value))
        parameters = self._network.parameters()
        self._optimizer: Any = torch.optim.SGD(parameters, lr=task.learning_rate, momentum=task.momentum)
        self._model: Any = self._network
        self._hook = Hook.of("ddp" if contestant.kind == ALONE else contestant.variant, assignment.start_iteration)
        if contestant.kind != ALONE:
            torch.distributed.init_process_group("gloo")  # MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
            self._distribute(self._hook, assignment.ranks_per_node)

    def _distribute(self, hook: Hook, ranks_per_node: int) -> None:
        from torch.distributed import new_subgroups, optim
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
        from torch.distributed.algorithms.model_averaging import averagers
        from torch.nn.parallel import DistributedDataParallel

        # The collectives of two buckets of PowerSGD's hook overtake each other on Gloo: all in one bucket.
        megabytes = 1024 if hook.kind == "powersgd" else hook.bucket_mb
        model = DistributedDataParallel(self._network, **({"bucket_cap_mb": megabytes} if megabytes else {}))
        self._model = model
        if hook.kind == "bf16":
            # DDP takes bf16_compress_hook on NCCL only and knows it by its name; Gloo sums bfloat16 as well.
            model.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        elif hook.kind == "powersgd":
            ranks = {"matrix_approximation_rank": hook.number, "start_powerSGD_iter": hook.start}
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **ranks), powerSGD_hook.powerSGD_hook)
        elif hook.kind == "post_local_sgd":
            inside_node, _ = new_subgroups(ranks_per_node)
            state = post_localSGD_hook.PostLocalSGDState(None, inside_node, start_localSGD_iter=hook.start)
            model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
            averager = averagers.PeriodicModelAverager(period=hook.number, warmup_steps=hook.start)
            self._optimizer = optim.PostLocalSGDOptimizer(self._optimizer, averager)

    def step(self, features: Any, labels: Any) -> float:
        cross_entropy, tensor = self._torch.nn.functional.cross_entropy, self._torch.from_numpy
        loss = cross_entropy(self._model(tensor(features)), tensor(labels))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def weights(self) -> Weights:
        # Taken anew: an averager replaces the parameters' data.
        return [tensor.numpy() for tensor in torch_tensors(self._network)]

    def facts(self) -> dict[str, Any]:
        return {"threads": self._torch.get_num_threads(), **self._hook.rhythm()}


def train_for_recommend(task: Task) -> None:
    trainee = OurTrainee(task, 1, 1)
    batches = Batches(task, trainee.rank, fleet_train.fleet.worker_num())
    for step in range(2000):
        trainee.step(*batches.at(step))


def main() -> None:
    if sys.argv[1] == "task":
        train_for_recommend(TASKS[sys.argv[2]])
        return
    assignment = Assignment.read(Path(sys.argv[1]))
    if parse(assignment.contestant).framework == TORCH:
        run(TorchTrainee(assignment), assignment, int(sys.argv[2]))
        return
    trainee = OurTrainee(assignment.task, assignment.node_num, assignment.ranks_per_node)
    run(trainee, assignment, int(sys.argv[2]) if len(sys.argv) > 2 else trainee.rank)


if __name__ == "__main__":
    main()
