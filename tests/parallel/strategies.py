"""Run as several ranks: each strategy of a profile through the facade, beside the simulator with all ranks, and beside
one process with the joint batch, which is the closed form of the synchronous ones.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from fleet_train.selftest.check_profiles import Reference
from fleet_train.selftest.training import (
    BATCH_NORM,
    SAMPLES_PER_RANK,
    SPARSE,
    Network,
    Trained,
    batches,
    relative_difference,
    share,
)
from tests.parallel.local_sgd import CountedAllReduce, adam, momentum
from tests.parity.networks import NETWORKS
from tests.support.worker import digest, report

STEPS = 12
LARGE = NETWORKS[4]


def sgd() -> Any:
    return paddle.optimizer.SGD(0.05)


def without_decay() -> Any:
    # DGC carries the momentum; weight decay would act outside it, unlike in Paddle's Momentum.
    return paddle.optimizer.Momentum(0.05, 0.9)


CASES: dict[str, tuple[Network, Any, dict[str, Any]]] = {
    "fused": (NETWORKS[0], adam, {}),
    "unfused": (NETWORKS[0], momentum, {"fuse_all_reduce_ops": False}),
    "four communicators": (LARGE, momentum, {"nccl_comm_num": 4, "fuse_parameter_groups_size": 2}),
    "waiting": (NETWORKS[0], momentum, {"sync_nccl_allreduce": True, "fuse_parameter_groups_size": 1}),
    "merge": (NETWORKS[0], adam, {"accumulate_steps": 3}),
    "merge, two communicators": (LARGE, momentum, {"accumulate_steps": 2, "nccl_comm_num": 2}),
    "merge, executor's threads": (LARGE, momentum, {"accumulate_steps": 2, "num_threads": 4}),
    "recompute": (LARGE, momentum, {"recompute_segments": 3}),
    "sync batch norm": (BATCH_NORM, momentum, {"sync_batch_norm": True}),
    "bf16": (NETWORKS[0], momentum, {"compression": "bf16"}),
    "int8": (NETWORKS[0], momentum, {"compression": "int8"}),
    "int8, merge, two communicators": (
        LARGE,
        momentum,
        {
            "compression": "int8",
            "compression_declines": False,
            "accumulate_steps": 2,
            "nccl_comm_num": 2,
            "fuse_parameter_groups_size": 2,
        },
    ),
    # Small networks: of many thousand elements one is now and then rounded to the other side of a middle.
    "int4": (NETWORKS[0], momentum, {"compression": "int4", "quantised_block_size": 64}),
    "int4, stochastic": (
        NETWORKS[0],
        momentum,
        {"compression": "int4", "quantised_rounding": "stochastic", "quantised_error_feedback": False},
    ),
    "powersgd": (LARGE, sgd, {"compression": "powersgd", "powersgd_rank": 2}),
    "powersgd, late": (LARGE, sgd, {"compression": "powersgd", "powersgd_start_step": STEPS}),
    "dgc": (SPARSE, without_decay, {"compression": "dgc", "dgc_sparsity": 0.9}),
    "dgc, ramp": (
        SPARSE,
        sgd,
        {"compression": "dgc", "dgc_sparsity": 0.99, "dgc_rampup_begin_step": 3, "dgc_rampup_steps": 6},
    ),
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
    "hierarchical": (LARGE, momentum, {"use_hierarchical_allreduce": True, "nccl_comm_num": 2}),
    "hierarchical, bf16": (NETWORKS[0], momentum, {"use_hierarchical_allreduce": True, "compression": "bf16"}),
    "hierarchical, int4": (
        NETWORKS[0],
        momentum,
        {"use_hierarchical_allreduce": True, "compression": "int4", "nccl_comm_num": 2},
    ),
    "hierarchical, powersgd": (
        LARGE,
        sgd,
        {"use_hierarchical_allreduce": True, "compression": "powersgd", "powersgd_rank": 2},
    ),
    "hierarchical, merge": (NETWORKS[0], adam, {"use_hierarchical_allreduce": True, "accumulate_steps": 3}),
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
    reference = reference_of(network, make, start, profile)
    data, sent, from_reference = batches(STEPS, SAMPLES_PER_RANK * world, seed), [], 0.0
    for features, labels in data:
        counted.calls = 0
        many.step(features[share(rank)], labels[share(rank)])
        sent.append(counted.calls)
        if reference is not None:
            reference.step(features, labels)
            from_reference = max(from_reference, difference_from(reference, many))
    size = profile.accumulate_steps
    for first in range(0, STEPS, size):
        one.step(*joined(data[first : first + size]))
    return {
        "start": digest({n: v for n, v in start.items() if n in one.state()}),
        "parameters": digest(many.parameters()),
        "difference": relative_difference(many.parameters(), one.parameters()),
        "from_reference": from_reference if reference is not None else None,
        "moved": relative_difference(many.parameters(), {n: start[n] for n in many.parameters()}),
        "sent": sent,
    }


def reference_of(network: Network, make: Any, start: dict[str, np.ndarray], profile: Profile) -> Reference | None:
    """The simulated job; none for synchronised batch norm, whose ranks talk within their passes."""
    precision = None
    if profile.amp_level != "O0":
        precision = Profile(amp_level=profile.amp_level, amp_dtype=profile.amp_dtype)
    return None if profile.sync_batch_norm else Reference(network, make, start, precision)


def difference_from(reference: Reference, many: Trained) -> float:
    parameters = many.parameters()
    simulated = reference.job.ranks[fleet.worker_index()]
    return relative_difference(parameters, {name: simulated[name] for name in parameters})


def missing(trained: Trained, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """DGC takes the momentum over: the plain optimizer has velocities that the product's has not."""
    return {name: value for name, value in trained.state().items() if name not in start}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    counted = CountedAllReduce()
    chosen = json.loads(sys.argv[1])
    # Other seeds with another number of ranks: each case is tried with two of them.
    seeds = {name: 100 * fleet.worker_num() + number for number, name in enumerate(CASES)}
    results = {name: run(*CASES[name], seeds[name], counted) for name in chosen}
    report(fleet.worker_index(), cases=results)


if __name__ == "__main__":
    main()
