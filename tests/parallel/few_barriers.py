"""Run as several ranks: profiles with all barriers and with few, from the same values, in one job."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker, timeouts
from fleet_train.convert.fleet import _current
from fleet_train.profile import Profile, load_profile
from fleet_train.selftest.training import SAMPLES_PER_RANK, Trained, batches, share
from tests.parallel.local_sgd import MLP, adam
from tests.support.worker import digest, report

STEPS, EVERY = 12, 5
SHORT = {"use_local_sgd": True, "local_sgd_is_warm_steps": 7, "local_sgd_steps": 2}
# Without comparisons of the replicas, which are synchronization points, too; and the remaining steps with a barrier.
CASES: dict[str, tuple[Profile, list[int]]] = {
    "default": (Profile(divergence_check_steps=0), [1, 2, 5, 10]),
    "multi_node": (load_profile("multi_node").with_settings("test", divergence_check_steps=0), [1, 2, 5, 10]),
    "small buckets": (
        Profile(divergence_check_steps=0, fuse_parameter_groups_size=1, nccl_comm_num=2),
        [1, 2, 5, 10],
    ),
    "local_sgd": (Profile(divergence_check_steps=0, **SHORT), [1, 2, 5]),
    "merge": (Profile(divergence_check_steps=0, accumulate_steps=2), [1, 2, 5]),
    "compared": (Profile(divergence_check_steps=4), []),
}


def train(profile: Profile, start: dict[str, np.ndarray] | None) -> tuple[Trained, dict[str, np.ndarray], list[str]]:
    """The program, what it started from, and the names of its step barriers."""
    job, names = _current().job, []
    real = job.step_barrier

    def step_barrier(name: str, *arguments: Any) -> Any:
        names.append(name.partition(" of program")[0])
        return real(name, *arguments)

    paddle.seed(7)
    trained = Trained(MLP, lambda inner: fleet.distributed_optimizer(inner, profile), adam)
    if start is not None:
        trained.start_from(start)
    start = trained.state()
    job.step_barrier = step_barrier  # type: ignore[method-assign]
    try:
        for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), 3):
            trained.step(features[share(fleet.worker_index())], labels[share(fleet.worker_index())])
    finally:
        del job.step_barrier
    return trained, start, names


def main() -> None:
    # A step that a busy machine makes longer than this would have a barrier more (tests/unit/collectives has the rule).
    timeouts.QUICK_STEP_SECONDS = float("inf")
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    found = {}
    for name, (profile, _) in CASES.items():
        all_of_them, start, names = train(profile, None)
        few, _, fewer = train(profile.with_settings("test", barrier_every_steps=EVERY), start)
        found[name] = {
            "start": digest(start),
            "all": [digest(all_of_them.state()), names],
            "few": [digest(few.state()), fewer],
        }
    report(fleet.worker_index(), found=found)


if __name__ == "__main__":
    main()
