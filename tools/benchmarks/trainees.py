"""What trains a task in one rank: a static program with our changed lines, stock Paddle, PyTorch, torchft, Horovod."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from fleet_train.files import publish_where_linked
from tools.benchmarks.contestants import (
    ALONE,
    DDP,
    FLEET,
    HOROVOD,
    OURS,
    POST_LOCAL_SGD,
    POWERSGD,
    SPARSE,
    TORCH,
    TORCHFT,
    DiLoCo,
    Hook,
    rhythm,
)
from tools.benchmarks.networks import PaddleKit, TorchKit, Weights, build, torch_tensors
from tools.benchmarks.ranks import INTERFACE, Assignment, wait_for_all
from tools.benchmarks.tasks import Inputs, Task


class Trainee(Protocol):
    """``rank``: of this process. Weights: in the order of the network's parameters, as Paddle has them."""

    rank: int

    def step(self, inputs: Inputs, labels: Inputs) -> None: ...
    def weights(self) -> Weights: ...
    def facts(self) -> dict[str, Any]: ...


def trainee_of(assignment: Assignment, rank: int | None) -> Trainee:
    """``rank``: None where our launcher gives it."""
    contestant = assignment.contestant
    if contestant.needs_torch:
        return TorchTrainee(assignment, rank or 0)
    if contestant.baseline == f"{ALONE}:{OURS}" or contestant.variant == FLEET:
        return StaticTrainee(assignment.task, contestant.kind, assignment, rank)
    return DynamicTrainee(assignment, rank or 0)


def _paddle_optimizer(task: Task, **parameters: Any) -> Any:
    import paddle

    if task.momentum is None:
        return paddle.optimizer.Adam(task.learning_rate, **parameters)
    return paddle.optimizer.Momentum(task.learning_rate, task.momentum, **parameters)


class StaticTrainee:
    """A static program. With ``ours`` the changed lines, and the launcher's --strategy; with ``paddle`` stock Fleet's;
    with ``alone`` none, as it was for one card."""

    def __init__(
        self, task: Task, kind: str = OURS, assignment: Assignment | None = None, rank: int | None = None
    ) -> None:
        import paddle

        paddle.enable_static()
        self.rank, place, self._fleet, self._assignment = rank or 0, paddle.CPUPlace(), None, assignment
        if kind == OURS:
            from fleet_train import fleet, role_maker

            fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
            self.rank, place, self._fleet = fleet.worker_index(), fleet.place(), fleet
        elif kind != ALONE:
            paddle.distributed.fleet.init(is_collective=True)
        (inputs, labels), kit = task.specs, PaddleKit(task.seed)
        fed = paddle.static.data("inputs", *inputs), paddle.static.data("labels", *labels)
        self._network = build(task, kit)
        self._loss = task.loss(paddle.nn.functional, self._network(fed[0]), fed[1])
        optimizer = _paddle_optimizer(task)
        if kind == OURS:
            optimizer = fleet.distributed_optimizer(optimizer)
        elif kind != ALONE:
            optimizer = paddle.distributed.fleet.distributed_optimizer(optimizer)
        optimizer.minimize(self._loss)
        self._main = fleet.main_program if kind == OURS else paddle.static.default_main_program()
        startup = fleet.startup_program if kind == OURS else paddle.static.default_startup_program()
        self._executor, scope = paddle.static.Executor(place), paddle.static.global_scope()
        self._executor.run(startup, feed=kit.start_feed(startup))
        names = [parameter.name for parameter in self._network.parameters()]
        self._held: Any = lambda: [scope.find_var(name).get_tensor() for name in names]

    def step(self, inputs: Inputs, labels: Inputs) -> None:
        self._executor.run(self._main, feed={"inputs": inputs, "labels": labels}, fetch_list=[self._loss])

    def weights(self) -> Weights:
        return [np.array(each) for each in self._held()]

    def facts(self) -> dict[str, Any]:
        if self._fleet is None:
            return {}
        from fleet_train.cluster import Cluster
        from fleet_train.plan.pricing import traffic

        plan, profile = self._fleet.plan(), self._fleet.profile()
        explicit = profile.model_dump(mode="json", include=set(profile.explicit))
        facts = {"profile": explicit, **rhythm(profile.model_dump(mode="json"))}
        if plan is None or self._assignment is None:
            return facts
        cluster = Cluster.imagined(self._assignment.node_num, self._assignment.ranks_per_node)
        predicted = fmean(traffic(plan, cluster).leaving)
        return facts | {"predicted_bytes": predicted, "gradient_bytes": plan.gradient_bytes}


class DynamicTrainee:
    """Stock Paddle in dynamic mode, with `paddle.DataParallel` or alone."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        import paddle

        self._paddle, self._task, self.rank = paddle, assignment.task, rank
        is_alone = assignment.contestant.kind == ALONE
        if not is_alone:
            paddle.distributed.init_parallel_env()
        self._network = build(self._task, PaddleKit(self._task.seed))
        self._model = self._network if is_alone else paddle.DataParallel(self._network)
        self._optimizer = _paddle_optimizer(self._task, parameters=self._network.parameters())

    def step(self, inputs: Inputs, labels: Inputs) -> None:
        tensor = self._paddle.to_tensor
        loss = self._task.loss(self._paddle.nn.functional, self._model(tensor(inputs)), tensor(labels))
        loss.backward()
        self._optimizer.step()
        self._optimizer.clear_grad()

    def weights(self) -> Weights:
        return [parameter.numpy() for parameter in self._network.parameters()]

    def facts(self) -> dict[str, Any]:
        return {}


class TorchTrainee:
    """PyTorch: DistributedDataParallel with one of its hooks, under Horovod or torchft, or alone. Its Adam is the fused
    one; with sparse gradients of embeddings SparseAdam, which moves touched rows only, for these."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        contestant, task = assignment.contestant, assignment.task
        self._torch, self._task, self.rank = torch, task, rank
        self._hook = Hook.of(contestant.variant if contestant.kind == TORCH else DDP)
        self._network = self._model = build(task, TorchKit(task.seed, has_sparse_tables=self._hook.kind == SPARSE))
        self._optimizers, self._rhythm = self._optimizers_of(task), self._hook.rhythm()
        world = (Path(assignment.folder), assignment.world_size, rank, assignment.timeout_seconds)
        if contestant.kind == TORCH:
            torch.distributed.init_process_group("gloo")  # MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
            self._distribute(self._hook, assignment.ranks_per_node)
        elif contestant.kind == HOROVOD:
            self._optimizers = under_horovod(self._optimizers, self._network, *world)
        elif contestant.kind == TORCHFT:
            settings = DiLoCo.of(contestant.variant)
            self._rhythm = settings.rhythm()
            self._held = under_torchft(settings, self._optimizers[0], self._network, *world)

    def _optimizers_of(self, task: Task) -> list[Any]:
        optim, parameters = self._torch.optim, list(self._network.parameters())
        if task.momentum is not None:
            return [optim.SGD(parameters, lr=task.learning_rate, momentum=task.momentum)]
        tables = [each.weight for each in self._network.modules() if getattr(each, "sparse", False)]
        others = [each for each in parameters if not any(each is table for table in tables)]
        sparse = [optim.SparseAdam(tables, lr=task.learning_rate)] if tables else []
        return [optim.Adam(others, lr=task.learning_rate, fused=True), *sparse]

    def _distribute(self, hook: Hook, ranks_per_node: int) -> None:
        from torch.distributed import new_subgroups, optim
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
        from torch.distributed.algorithms.model_averaging import averagers
        from torch.nn.parallel import DistributedDataParallel

        # The collectives of two buckets of PowerSGD's hook overtake each other on Gloo: all in one bucket.
        megabytes = 1024 if hook.kind == POWERSGD else hook.bucket_mb
        model = DistributedDataParallel(self._network, **({"bucket_cap_mb": megabytes} if megabytes else {}))
        self._model = model
        if hook.kind == "bf16":
            # DDP takes bf16_compress_hook on NCCL only and knows it by its name; Gloo sums bfloat16 as well.
            model.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        elif hook.kind == POWERSGD:
            ranks = {"matrix_approximation_rank": hook.number, "start_powerSGD_iter": hook.start}
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **ranks), powerSGD_hook.powerSGD_hook)
        elif hook.kind == POST_LOCAL_SGD:
            inside_node, _ = new_subgroups(ranks_per_node)
            state = post_localSGD_hook.PostLocalSGDState(None, inside_node, start_localSGD_iter=hook.start)
            model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
            averager = averagers.PeriodicModelAverager(period=hook.number, warmup_steps=hook.start)
            self._optimizers = [optim.PostLocalSGDOptimizer(each, averager) for each in self._optimizers]

    def step(self, inputs: Inputs, labels: Inputs) -> None:
        functional, tensor = self._torch.nn.functional, self._torch.from_numpy
        loss = self._task.loss(functional, self._model(tensor(inputs)), tensor(labels))
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        float(loss.detach())

    def weights(self) -> Weights:
        # Taken anew: an averager replaces the parameters' data.
        return torch_tensors(self._network)

    def facts(self) -> dict[str, Any]:
        return {"threads": self._torch.get_num_threads(), **self._rhythm}


def under_horovod(
    optimizers: Sequence[Any], model: Any, folder: Path, ranks: int, rank: int, timeout_seconds: float
) -> list[Any]:
    """Horovod's optimizers over Gloo. Rank 0 has the rendezvous that horovodrun would have, and publishes its port in
    the folder that all ranks share."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    port = folder / "rendezvous"
    if rank == 0:
        hosts = ",".join(f"host{number}:1" for number in range(ranks))
        server = RendezvousServer(0)
        number = server.start()
        server.init(get_host_assignments(parse_hosts(hosts), ranks))
        publish_where_linked(port, str(number).encode())
    wait_for_all(folder, ranks, rank, 0, timeout_seconds)
    of_job = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank, "CROSS_SIZE": ranks}
    of_gloo = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": INTERFACE, "HOSTNAME": f"host{rank}"}
    of_gloo |= {"GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"], "GLOO_RENDEZVOUS_PORT": port.read_text()}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in (of_job | of_gloo).items()})

    import horovod.torch as hvd

    hvd.init()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        hvd.DistributedOptimizer(
            each, [(names[id(one)], one) for group in each.param_groups for one in group["params"]]
        )
        for each in optimizers
    ]


def under_torchft(
    settings: DiLoCo, optimizer: Any, model: Any, folder: Path, ranks: int, rank: int, timeout_seconds: float
) -> Any:
    """torchft's DiLoCo around an optimizer; hold what is returned. Each rank is a replica group; rank 0 has the
    lighthouse, and publishes its address in the folder that all ranks share."""
    from contextlib import ExitStack
    from datetime import timedelta

    import torch
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo as Averaging
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    published, host = folder / "lighthouse", os.environ["BENCH_ADDRESS"]
    lighthouse = None
    if rank == 0:
        lighthouse = LighthouseServer(f"{host}:0", min_replicas=ranks)
        port = lighthouse.address().rpartition(":")[2]  # it names the host, which other nodes may not know
        publish_where_linked(published, f"http://{host}:{port}".encode())
    wait_for_all(folder, ranks, rank, 0, timeout_seconds)
    limit = timedelta(seconds=timeout_seconds)
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=ranks,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=published.read_text(),
        replica_id=f"rank{rank}",
        hostname=host,
        init_sync=False,
    )
    fragments = parts_of(model, settings.fragments)
    outer = [
        torch.optim.SGD(each.parameters(), lr=settings.outer_lr, momentum=settings.outer_momentum, nesterov=True)
        for each in fragments
    ]
    averaging = Averaging(
        manager, fragments, optimizer, outer, settings.steps, fragment_sync_delay=settings.delay, use_bucketization=True
    )
    stack = ExitStack()
    stack.enter_context(averaging)
    return stack, manager, store, lighthouse


def parts_of(model: Any, count: int) -> list[Any]:
    """The layers of a PyTorch network with parameters of their own, in order, in so many parts of about one size, each
    with a layer at least."""
    import torch

    layers = [each for each in model.modules() if next(each.parameters(recurse=False), None) is not None]
    sizes = np.cumsum([sum(value.numel() for value in each.parameters(recurse=False)) for each in layers])
    ends = [0]
    for part in range(1, count):
        wanted = int(np.searchsorted(sizes, part * sizes[-1] / count))
        ends.append(min(max(wanted, ends[-1] + 1), len(layers) - count + part))
    ends.append(len(layers))
    return [torch.nn.ModuleList(layers[begin:end]) for begin, end in pairwise(ends)]
