"""Run as ranks: what the trainer adds around an update, over several buckets, with a NaN on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from fleet_train.train.numerics import SkipNotFinite, WeightAverage, keep_statistics_finite
from tests.support.worker import digest, report
from tests.unit.passes.training import FEATURES, Trained, batches

STEPS, BAD_STEP, DECAY = 7, 2, 0.8
BUCKETS: dict[str, Any] = {"fuse_parameter_groups_size": 2}
PROFILES = {
    "synchronous": Profile(**BUCKETS),
    "synchronised batch norm": Profile(sync_batch_norm=True, **BUCKETS),
    "gradient merge": Profile(accumulate_steps=2, **BUCKETS),
    "LocalSGD": Profile(use_local_sgd=True, local_sgd_is_warm_steps=1, local_sgd_steps=3, **BUCKETS),
}


def network(features: Any) -> Any:
    return nn.Linear(24, 5)(nn.functional.relu(nn.BatchNorm1D(24)(nn.Linear(FEATURES, 24)(features))))


def run(profile: Profile) -> dict[str, Any]:
    paddle.seed(0)
    average, skipping = WeightAverage(DECAY), SkipNotFinite()

    def minimize(optimizer: Any, loss: Any) -> None:
        distributed = fleet.distributed_optimizer(optimizer, profile)
        distributed.around_update(average.follow)
        distributed.around_update(skipping.guard)
        distributed.minimize(loss)
        keep_statistics_finite(paddle.static.default_main_program())

    trained = Trained(lambda: paddle.optimizer.Momentum(0.1, 0.9), minimize, network)
    weights = [name for name in trained.parameters() if "batch_norm1d_0.w_1" not in name and "w_2" not in name]
    expected = {name: np.zeros_like(trained.parameters()[name], np.float64) for name in weights}
    updates = 0
    for step, (features, labels) in enumerate(batches(STEPS, 8, seed=fleet.worker_index())):
        if step == BAD_STEP and fleet.worker_index() == 1:
            features[0, 0] = np.nan
        skipped_before = count(trained, skipping)
        trained.step((features, labels))
        is_update = (step + 1) % profile.accumulate_steps == 0 and count(trained, skipping) == skipped_before
        updates += is_update
        if is_update:
            now = trained.parameters()
            expected = {name: DECAY * expected[name] + (1 - DECAY) * now[name] for name in weights}
    mean = {name: fleet.all_reduce(value, op="sum") / fleet.worker_num() for name, value in expected.items()}
    with paddle.static.scope_guard(trained.scope):
        averaged = average.weights()
    errors = [np.abs(averaged[name] - mean[name] / (1 - DECAY**updates)).max() for name in averaged]
    return {
        "skipped": count(trained, skipping),
        "updates": updates,
        "average_error": float(max(errors)),
        "averaged": len(averaged),
        "average_digest": digest(averaged),
        "weights_digest": digest({name: trained.parameters()[name] for name in weights}),
        "finite": all(np.isfinite(value).all() for value in trained.state().values()),
    }


def count(trained: Trained, skipping: SkipNotFinite) -> int:
    with paddle.static.scope_guard(trained.scope):
        return skipping.count()


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    report(fleet.worker_index(), cases={name: run(profile) for name, profile in PROFILES.items()})


if __name__ == "__main__":
    main()
