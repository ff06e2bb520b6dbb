"""Run as ranks: each bucket updated during the next one's allreduce, beside one update after the last bucket."""

from __future__ import annotations

from typing import Any

import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from fleet_train.selftest.training import SAMPLES_PER_RANK, Trained, batches
from tests.parity.networks import NETWORKS
from tests.support.worker import digest, report

STEPS = 6
PROFILE = Profile(nccl_comm_num=2, fuse_parameter_groups_size=2)
OPTIMIZERS: dict[str, Any] = {
    "Momentum": lambda clip: paddle.optimizer.Momentum(0.05, 0.9, weight_decay=1e-4, grad_clip=clip),
    "AdamW": lambda clip: paddle.optimizer.AdamW(0.01, weight_decay=0.05, grad_clip=clip),
    "Lamb": lambda clip: paddle.optimizer.Lamb(0.01, grad_clip=clip),
    "Adamax": lambda clip: paddle.optimizer.Adamax(0.01, grad_clip=clip),
}
# A bound that no gradient comes near: each is multiplied by 1.0. Only the order of operators differs.
CLIPS: dict[str, Any] = {
    "none": lambda: None,
    "each by its own norm": lambda: paddle.nn.ClipGradByNorm(1e9),
    "all by their norm": lambda: paddle.nn.ClipGradByGlobalNorm(1e9),
}


def run(make: Any, clip: Any, seed: int) -> dict[str, Any]:
    paddle.seed(seed)
    trained = Trained(NETWORKS[4], lambda inner: fleet.distributed_optimizer(inner, PROFILE), lambda: make(clip()))
    share = slice(fleet.worker_index() * SAMPLES_PER_RANK, (fleet.worker_index() + 1) * SAMPLES_PER_RANK)
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), seed):
        trained.step(features[share], labels[share])
    names = [operator.name() for operator in trained.main.global_block().ops]
    waits = [place for place, name in enumerate(names) if "fleet_train_wait" in name]
    updates = [place for place, name in enumerate(names) if name.startswith("pd_op.") and is_update(name)]
    return {
        "digest": digest(trained.parameters()),
        "waits": len(waits),
        "updates_before_the_last_wait": sum(place < waits[-1] for place in updates),
        "updates": len(updates),
    }


def is_update(name: str) -> bool:
    return name in ("pd_op.momentum_", "pd_op.adamw_", "pd_op.lamb_", "pd_op.adamax_")


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    cases = {
        name: {clip: run(make, CLIPS[clip], seed) for clip in CLIPS}
        for seed, (name, make) in enumerate(OPTIMIZERS.items())
    }
    report(fleet.worker_index(), cases=cases)


if __name__ == "__main__":
    main()
