"""A rank of the benchmark of strategies. argv: assignment, and the rank where no launcher of ours gives it.

As a script for ``recommend`` (argv: ``task``, its name) it trains a task of the benchmarks until it is ended.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import fleet_train  # of the checkout that PYTHONPATH names, which may be another than this file's

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from fleet_train.files import publish_where_linked
from tools.benchmarks.report import window_of
from tools.benchmarks.tasks import (
    ALONE,
    TASKS,
    TORCH,
    Batches,
    Hook,
    PaddleKit,
    Task,
    TorchKit,
    Weights,
    build,
    judged,
    parse,
    start_feed,
    start_weights,
    torch_tensors,
)

INTERFACE = "eth0"
# After the last rank has finished a step, sockets may still hold bytes of it.
_DRAIN_SECONDS = 0.05


@dataclass(frozen=True)
class Assignment:
    """A worker's input: the job, and the folder that all ranks share."""

    task: Task
    contestant: str
    folder: str
    node_num: int
    ranks_per_node: int
    timeout_seconds: float
    start_iteration: int  # plain steps before PyTorch's hooks, unless the contestant's name gives them

    @property
    def world_size(self) -> int:
        return self.node_num * self.ranks_per_node

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Assignment:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Assignment(**(content | {"task": Task(**content["task"])}))


def wait_for_all(folder: Path, ranks: int, rank: int, number: int, timeout_seconds: float) -> None:
    """A barrier over files in the shared folder: it sends nothing that is measured."""
    deadline = time.monotonic() + timeout_seconds
    (folder / f"barrier-{number}-{rank}").touch()
    for other in range(ranks):
        while not (folder / f"barrier-{number}-{other}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {other} did not reach barrier {number} of the benchmark")
            time.sleep(0.001)


def interface_bytes() -> int:
    """Bytes that the node has sent, by the counter of its interface: one header per piece of up to 64 KiB that TCP
    hands over. Fast enough to be read in every step."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def wire_bytes() -> int:
    """The same by the rate limit, which counts a header per packet of the link's size; 0 without one. Takes
    milliseconds."""
    command = ["tc", "-s", "qdisc", "show", "dev", INTERFACE]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    found = re.search(r"Sent ([0-9]+) bytes", shown) if "qdisc tbf" in shown else None
    return int(found[1]) if found else 0


def run(trainee: OurTrainee | TorchTrainee, assignment: Assignment, rank: int) -> None:
    """Train the whole task without interruption, and write this rank's record and weights.

    Every ``evaluate_every`` steps and at the end the weights are copied, with the clock stopped and nobody waited for:
    what a strategy sends beside local steps has these milliseconds for nothing, and they are in the record. The bytes
    sent so far are read when a step ends, also after the last: what is under way where whole periods begin is under
    way where they end, and is counted once. Only these two counts are recorded.
    """
    task, folder, ranks = assignment.task, Path(assignment.folder), assignment.world_size
    batches = [Batches(task, rank, ranks).at(step) for step in range(task.steps)]
    # Memory for the copies is taken and touched before the training: a copy that takes what the step has just freed
    # makes the next step touch new pages, which costs as much as the step itself.
    steps = [*range(task.evaluate_every, task.steps, task.evaluate_every), task.steps]
    kept = {step: [np.array(value) for value in trainee.weights()] for step in steps}
    facts = trainee.facts()
    window = window_of(facts, task.warmup_steps, task.steps)
    seconds, after, paused = [], [0], 0.0
    wait_for_all(folder, ranks, rank, 1, assignment.timeout_seconds)
    interface, wire = interface_bytes(), wire_bytes()
    for step, (features, labels) in enumerate(batches, 1):
        began = time.perf_counter()
        trainee.step(features, labels)
        ended = time.perf_counter()
        seconds.append(round(ended - began, 6))
        after.append(interface_bytes() - interface)
        if step in kept:
            for copy, value in zip(kept[step], trainee.weights(), strict=True):
                np.copyto(copy, value)
            paused += time.perf_counter() - ended
    wait_for_all(folder, ranks, rank, 2, assignment.timeout_seconds)
    time.sleep(_DRAIN_SECONDS)
    record = {
        "rank": rank,
        "step_seconds": seconds,
        "interface_after": [[step, after[step]] for step in (window.first, window.last)],
        "sent": {"interface": interface_bytes() - interface, "wire": wire_bytes() - wire},
        "paused_seconds": paused,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "facts": facts,
    }
    for step, weights in kept.items():
        np.savez(folder / f"weights-{step}-{rank}.npz", *weights)
    publish_where_linked(folder / f"rank{rank}.json", json.dumps(record).encode())
    wait_for_all(folder, ranks, rank, 3, assignment.timeout_seconds)  # no rank ends while another may still need it


def evaluated(task: Task, folder: Path, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of all ranks, the first one with accuracies and test losses by step: of the mean of all ranks'
    weights, also of running statistics. Replicas of strategies with local steps differ, and are judged together."""
    accuracies, losses = [], []
    for step in sorted({int(path.name.split("-")[1]) for path in folder.glob("weights-*.npz")}):
        files = [np.load(folder / f"weights-{step}-{rank}.npz") for rank in range(len(ranks))]
        means = [np.mean([file[name] for file in files], axis=0) for name in files[0].files]
        accuracy, loss = judged(task, means)
        accuracies.append((step, accuracy))
        losses.append((step, loss))
    first = dict(ranks[0]) | {"accuracies": accuracies, "test_losses": losses}
    return [first, *(dict(rank) | {"accuracies": [], "test_losses": []} for rank in ranks[1:])]


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
