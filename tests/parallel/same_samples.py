"""Run as several ranks: what a rank is advised of when all read the same samples, and when each reads its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.convert.fleet import _current
from fleet_train.profile import Profile
from fleet_train.selftest.training import FEATURES, SAMPLES_PER_RANK, Network, Trained, batches, share
from tests.parallel.local_sgd import MLP, STREAMING, adam
from tests.support.worker import report

STEPS = 14
CASES = {
    "default": Profile(),
    "few barriers": Profile(barrier_every_steps=5, divergence_check_steps=0),
    "small buckets": Profile(fuse_parameter_groups_size=1, nccl_comm_num=2),
    "int8": Profile(compression="int8"),
    "merge": Profile(accumulate_steps=2),
    "local steps from the start": Profile(use_local_sgd=True, local_sgd_is_warm_steps=0, local_sgd_steps=4),
    "local steps later": Profile(use_local_sgd=True, local_sgd_is_warm_steps=3, local_sgd_steps=4),
    "overlapped": Profile(use_local_sgd=True, local_sgd_is_warm_steps=0, **STREAMING),
}


def advised(train: Callable[[], None]) -> list[str]:
    told: list[str] = []
    _current().job.advise = lambda error: told.append(str(error))
    train()
    return told


def train(profile: Profile, same: bool) -> None:
    paddle.seed(7)
    trained = Trained(MLP, lambda inner: fleet.distributed_optimizer(inner, profile), adam)
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), 1):
        mine = share(0 if same else fleet.worker_index())
        trained.step(features[mine], labels[mine])


def equal_by_nature(features: Any) -> Any:
    """Every gradient is zero, whatever the samples."""
    return paddle.nn.Linear(FEATURES, 5)(features) * 0.0 + paddle.nn.Linear(FEATURES, 5)(features * 0.0) * 0.0


def train_zeros() -> None:
    trained = Trained(Network("zero", equal_by_nature), fleet.distributed_optimizer, lambda: paddle.optimizer.SGD(0.1))
    for features, labels in batches(5, SAMPLES_PER_RANK, 1):
        trained.step(features, labels)


def train_constant_gradient_of_a_bias() -> None:
    """A loss that is the output itself: the gradient of its last bias is 1 on every rank."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with (
        paddle.static.program_guard(main, startup),
        paddle.utils.unique_name.guard(),
        paddle.static.scope_guard(paddle.static.Scope()),
    ):
        loss = paddle.nn.Linear(4, 1)(paddle.static.data("x", [None, 4], "float32")).mean()
        profile = Profile(fuse_parameter_groups_size=1)
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), profile).minimize(loss)
        exe = paddle.static.Executor(fleet.place())
        exe.run(startup)
        random = np.random.default_rng(fleet.worker_index())
        for _ in range(5):
            exe.run(main, feed={"x": random.standard_normal((3, 4)).astype("float32")})


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    found = {
        name: [advised(partial(train, profile, same)) for same in (True, False)] for name, profile in CASES.items()
    }

    innocent = {"zero gradients": advised(train_zeros), "a bias": advised(train_constant_gradient_of_a_bias)}
    report(fleet.worker_index(), found=found, innocent=innocent)


if __name__ == "__main__":
    main()
