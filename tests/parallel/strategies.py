"""Run as several ranks: each strategy of a profile through the facade, beside one process with the joint batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.parallel.local_sgd import BATCH_NORM, CountedAllReduce, adam, momentum
from tests.parity.compare import SAMPLES_PER_RANK, Trained, relative_difference
from tests.parity.networks import NETWORKS, Network, batches
from tests.support.worker import digest, report

STEPS = 12
LARGE = NETWORKS[4]


def sgd() -> Any:
    return paddle.optimizer.SGD(0.05)


def without_decay() -> Any:
    # DGC carries the momentum; weight decay would act outside it, unlike in Paddle's Momentum.
    return paddle.optimizer.Momentum(0.05, 0.9)


CASES: dict[str, tuple[Network, Any, dict[str, Any]]] = {
    "merge": (NETWORKS[0], adam, {"accumulate_steps": 3}),
    "merge, two communicators": (LARGE, momentum, {"accumulate_steps": 2, "nccl_comm_num": 2}),
    "merge, executor's threads": (LARGE, momentum, {"accumulate_steps": 2, "num_threads": 4}),
    "recompute": (LARGE, momentum, {"recompute_segments": 3}),
    "sync batch norm": (BATCH_NORM, momentum, {"sync_batch_norm": True}),
    "bf16": (NETWORKS[0], momentum, {"compression": "bf16"}),
    "powersgd": (LARGE, sgd, {"compression": "powersgd", "powersgd_rank": 2}),
    "powersgd, late": (LARGE, sgd, {"compression": "powersgd", "powersgd_start_step": STEPS}),
    "dgc": (LARGE, without_decay, {"compression": "dgc", "dgc_sparsity": 0.9}),
    "dgc, late": (NETWORKS[0], without_decay, {"compression": "dgc", "dgc_rampup_begin_step": STEPS}),
    "amp O1": (NETWORKS[0], momentum, {"amp_level": "O1"}),
    "amp O2, merge": (NETWORKS[1], momentum, {"amp_level": "O2", "accumulate_steps": 2}),
    "amp O1, local_sgd": (
        NETWORKS[0],
        momentum,
        {"amp_level": "O1", "use_local_sgd": True, "local_sgd_is_warm_steps": 2, "local_sgd_steps": 5},
    ),
    "merge, local_sgd": (
        NETWORKS[0],
        momentum,
        {"accumulate_steps": 2, "use_local_sgd": True, "local_sgd_is_warm_steps": 2, "local_sgd_steps": 2},
    ),
}


def joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def run(network: Network, make: Any, settings: dict[str, Any], seed: int, counted: CountedAllReduce) -> dict[str, Any]:
    rank, world = fleet.worker_index(), fleet.worker_num()
    profile = Profile(**settings)
    paddle.seed(seed * 10 + rank)
    many = Trained(network, lambda inner: fleet.distributed_optimizer(inner, profile), make)
    one = Trained(network, lambda inner: inner, make)
    start = many.state()
    one.start_from({name: start[name] for name in one.state() if name in start} | missing(one, start))
    share = slice(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)
    data, sent = batches(STEPS, SAMPLES_PER_RANK * world, seed), []
    for features, labels in data:
        counted.calls = 0
        many.step(features[share], labels[share])
        sent.append(counted.calls)
    size = profile.accumulate_steps
    for first in range(0, STEPS, size):
        one.step(*joined(data[first : first + size]))
    return {
        "start": digest({n: v for n, v in start.items() if n in one.state()}),
        "parameters": digest(many.parameters()),
        "difference": relative_difference(many.parameters(), one.parameters()),
        "moved": relative_difference(many.parameters(), {n: start[n] for n in many.parameters()}),
        "sent": sent,
    }


def missing(trained: Trained, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """DGC takes the momentum over: the plain optimizer has velocities that the product's has not."""
    return {name: value for name, value in trained.state().items() if name not in start}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    counted = CountedAllReduce()
    results = {name: run(*case, seed, counted) for seed, (name, case) in enumerate(CASES.items())}
    report(fleet.worker_index(), cases=results)


if __name__ == "__main__":
    main()
