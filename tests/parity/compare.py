"""Run as several ranks: trains each case on all ranks, then on one process with the joint batch, and reports both.

Reported per case: the largest relative difference of a parameter, and a digest of all parameters on this rank.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import paddle
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from fleet_train.selftest.training import SAMPLES_PER_RANK, Network, Trained, batches, relative_difference
from tests.parity.networks import NETWORKS
from tests.support.worker import digest, report

STEPS = 20

PROFILES = {
    "unfused": Profile(fuse_all_reduce_ops=False),
    "fused": Profile(),
    "two communicators": Profile(nccl_comm_num=2, fuse_parameter_groups_size=2),
    "hierarchical": Profile(use_hierarchical_allreduce=True, nccl_comm_num=2, fuse_parameter_groups_size=2),
    "local groups of two": Profile(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2),
    "no overlap": Profile(sync_nccl_allreduce=True, fuse_all_reduce_ops=False),
}


def optimizers() -> dict[str, Any]:
    schedule = paddle.optimizer.lr.StepDecay(0.05, step_size=7, gamma=0.5)
    return {
        "SGD": lambda: paddle.optimizer.SGD(0.1),
        "Momentum": lambda: paddle.optimizer.Momentum(schedule, 0.9, weight_decay=1e-4),
        "Adam": lambda: paddle.optimizer.Adam(0.01, epsilon=1e-3),
        "AdamW": lambda: paddle.optimizer.AdamW(
            0.01, epsilon=1e-3, weight_decay=0.05, grad_clip=nn.ClipGradByGlobalNorm(0.1)
        ),
    }


def compare(network: Network, optimizer: str, profile: Profile, seed: int) -> dict[str, Any]:
    rank, world = fleet.worker_index(), fleet.worker_num()
    paddle.seed(seed * 100 + rank)  # another start on every rank: rank 0's must win
    many = Trained(network, lambda inner: fleet.distributed_optimizer(inner, profile), optimizers()[optimizer])
    start = many.state()
    one = Trained(network, lambda inner: inner, optimizers()[optimizer])
    one.start_from(start)
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * world, seed):
        share = slice(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)
        many.step(features[share], labels[share])
        one.step(features, labels)
    moved = relative_difference(many.parameters(), {n: start[n] for n in many.parameters()})
    return {
        "start": digest(start),
        "state": digest(many.state()),
        "difference": relative_difference(many.parameters(), one.parameters()),
        "moved": moved,
        "collectives": fleet.plan().collectives_per_step,
    }


def main() -> None:
    """Compare the cases that the first argument names, as JSON."""
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    chosen = json.loads(sys.argv[1])
    cases = itertools.product(NETWORKS, chosen["optimizers"], chosen["profiles"])
    results = {
        f"{network.name}, {optimizer}, {profile}": compare(network, optimizer, PROFILES[profile], seed)
        for seed, (network, optimizer, profile) in enumerate(cases)
    }
    report(fleet.worker_index(), cases=results)


if __name__ == "__main__":
    main()
