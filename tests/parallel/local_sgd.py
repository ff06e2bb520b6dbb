"""Run as several ranks: LocalSGD by the product beside a simulation of all ranks in this process.

The simulation is one plain Paddle program per simulated rank and numpy for what is averaged between them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.parity.compare import SAMPLES_PER_RANK, Trained, relative_difference
from tests.parity.networks import FEATURES, NETWORKS, Network, batches
from tests.support.worker import digest, report

State = dict[str, np.ndarray]
STEPS = 17

LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 3, "local_sgd_steps": 4}


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9, weight_decay=1e-4)


def adam() -> Any:
    return paddle.optimizer.Adam(0.01, epsilon=1e-3)


def decaying() -> Any:
    return paddle.optimizer.Momentum(paddle.optimizer.lr.ExponentialDecay(0.05, 0.9), 0.9)


def with_batch_norm(features: Any) -> Any:
    # no bias: batch norm would take it out again, and its gradient is rounding noise
    hidden = paddle.nn.BatchNorm1D(12)(paddle.nn.Linear(FEATURES, 12, bias_attr=False)(features))
    return paddle.nn.Linear(12, 5)(paddle.tanh(hidden))


MLP, BATCH_NORM = NETWORKS[0], Network("with_batch_norm", with_batch_norm)
CASES: dict[str, tuple[Network, Any, dict[str, Any]]] = {
    "constant, keep": (MLP, momentum, {}),
    "two communicators, four buckets": (MLP, momentum, {"nccl_comm_num": 2, "fuse_parameter_groups_size": 2}),
    "adam": (MLP, adam, {}),
    "average momentum": (MLP, momentum, {"local_sgd_momentum": "average"}),
    "reset momentum": (MLP, momentum, {"local_sgd_momentum": "reset"}),
    "doubling": (MLP, momentum, {"local_sgd_schedule": "doubling"}),
    "adaptive": (MLP, decaying, {"local_sgd_schedule": "adaptive", "local_sgd_max_steps": 6}),
    "no warm-up": (MLP, adam, {"local_sgd_is_warm_steps": 0}),
    "slowmo": (MLP, momentum, {"outer_optimizer": "slowmo", "outer_momentum": 0.5}),
    "diloco": (MLP, adam, {"outer_optimizer": "diloco", "outer_lr": 0.7, "outer_momentum": 0.9}),
    "diloco without warm-up": (
        MLP,
        adam,
        {"outer_optimizer": "diloco", "outer_lr": 0.7, "outer_momentum": 0.9, "local_sgd_is_warm_steps": 0},
    ),
    "bfloat16 differences": (MLP, momentum, {"local_sgd_dtype": "bfloat16"}),
    "batch norm": (BATCH_NORM, momentum, {"local_sgd_is_warm_steps": 0}),
}


class Simulation:
    """All ranks in one process. ``settings`` are the profile's."""

    def __init__(self, network: Network, make: Any, settings: dict[str, Any], world: int, start: State) -> None:
        self.s = Profile(**settings)
        self.ranks = [Trained(network, lambda inner: inner, make) for _ in range(world)]
        self.joint = Trained(network, lambda inner: inner, make)
        for trained in (*self.ranks, self.joint):
            trained.start_from(start)
        self.anchor = self.trainable(self.joint.state())
        self.velocity: State = {}
        self.step_number = self.local_steps = 0
        self.period = 1 if self.s.local_sgd_schedule == "doubling" else self.s.local_sgd_steps
        self.first: tuple[float, float] | None = None
        self.losses = [0.0] * world
        self.averagings: list[int] = []

    def trainable(self, state: State) -> State:
        names = [p.name for p in self.joint.main.global_block().all_parameters() if not p.stop_gradient]
        return {name: state[name] for name in names}

    def rate(self) -> float:
        return float(self.ranks[0].optimizer.get_lr())

    def step(self, features: np.ndarray, labels: np.ndarray) -> None:
        self.step_number += 1
        if self.step_number <= self.s.local_sgd_is_warm_steps:
            self.joint.step(features, labels)
            for trained in self.ranks:
                trained.start_from(self.joint.state())
                self.follow_schedule(trained)
            self.anchor = self.trainable(self.joint.state())
            return
        rate = self.rate()
        for rank, trained in enumerate(self.ranks):
            share = slice(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)
            self.losses[rank] = trained.step(features[share], labels[share])
        self.local_steps += 1
        if self.local_steps >= self.period:
            self.average(rate)

    @staticmethod
    def follow_schedule(trained: Trained) -> None:
        rate = trained.optimizer._learning_rate
        if isinstance(rate, paddle.optimizer.lr.LRScheduler):
            rate.step()

    def average(self, rate: float) -> None:
        self.averagings.append(self.step_number)
        states = [trained.state() for trained in self.ranks]
        mean = {n: np.mean([s[n].astype("float64") for s in states], axis=0).astype("float32") for n in states[0]}
        agreed = self.outer_step(mean, rate)
        trainable = self.trainable(mean)
        self.anchor = agreed
        for state, trained in zip(states, self.ranks, strict=True):
            for name in state:
                if name in trainable:
                    state[name] = agreed[name]
                elif name.startswith("batch_norm") and "velocity" not in name:
                    state[name] = mean[name]
                if "velocity" in name and self.s.local_sgd_momentum != "keep":
                    state[name] = mean[name] if self.s.local_sgd_momentum == "average" else np.zeros_like(mean[name])
            trained.start_from(state)
        self.next_period(rate)

    def outer_step(self, mean: State, rate: float) -> State:
        kind, lr, beta = self.s.outer_optimizer, self.s.outer_lr, self.s.outer_momentum
        if kind == "none":
            return self.trainable(mean)
        agreed = {}
        for name, anchor in self.anchor.items():
            difference = anchor - mean[name]
            pushed = difference / rate if kind == "slowmo" else difference
            u = self.velocity[name] = beta * self.velocity.get(name, np.zeros_like(anchor)) + pushed
            agreed[name] = anchor - lr * rate * u if kind == "slowmo" else anchor - lr * (difference + beta * u)
        return agreed

    def next_period(self, rate: float) -> None:
        self.local_steps = 0
        if self.s.local_sgd_schedule == "doubling":
            self.period = min(2 * self.period, self.s.local_sgd_steps)
        elif self.s.local_sgd_schedule == "adaptive":
            loss = float(np.mean(self.losses))
            self.first = self.first or (rate, loss)
            growth = math.sqrt(self.first[0] / rate * loss / self.first[1])
            self.period = max(1, min(self.s.local_sgd_max_steps, math.ceil(growth * self.s.local_sgd_steps)))


class CountedAllReduce:
    """Counts the collectives of each step."""

    def __init__(self) -> None:
        self.calls = 0
        self._real = paddle.distributed.all_reduce
        paddle.distributed.all_reduce = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._real(*args, **kwargs)


def run(network: Network, make: Any, settings: dict[str, Any], seed: int, counted: CountedAllReduce) -> dict[str, Any]:
    rank, world = fleet.worker_index(), fleet.worker_num()
    profile = Profile(**LOCAL | settings)
    paddle.seed(seed * 10 + rank)
    real = Trained(network, lambda inner: fleet.distributed_optimizer(inner, profile), make)
    simulation = Simulation(network, make, LOCAL | settings, world, real.state())
    share = slice(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)
    worst, collectives, equal_at = 0.0, [], []
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * world, seed):
        counted.calls = 0
        real.step(features[share], labels[share])
        collectives.append(counted.calls)
        simulation.step(features, labels)
        expected = {n: v for n, v in simulation.ranks[rank].state().items() if n in real.parameters()}
        worst = max(worst, relative_difference(real.parameters(), expected))
        equal_at.append(digest(real.parameters()))
    return {
        "difference": worst,
        "collectives": collectives,
        "averagings": simulation.averagings,
        "digests": equal_at,
        "warm": profile.local_sgd_is_warm_steps,
    }


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    counted = CountedAllReduce()
    report(
        fleet.worker_index(),
        cases={name: run(*case, seed, counted) for seed, (name, case) in enumerate(CASES.items())},
    )


if __name__ == "__main__":
    main()
