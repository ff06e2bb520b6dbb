"""The plan of a program: found by converting it for an imagined cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle
import pytest

from fleet_train import fleet, role_maker
from fleet_train.cluster import Cluster
from fleet_train.convert.session import Planned, plan_of
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import CollectiveSpec


@pytest.fixture(autouse=True)
def static_mode() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()


def planned(profile: Profile, optimizer: Callable[[], Any]) -> Planned:
    """A network with two batch norms of 12 and 5 channels."""

    def script() -> None:
        fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            hidden = paddle.static.data("x", [None, 4], "float32")
            for channels in (12, 5):
                hidden = paddle.tanh(paddle.nn.BatchNorm1D(channels)(paddle.static.nn.fc(hidden, channels)))
            fleet.distributed_optimizer(optimizer(), profile).minimize(hidden.mean())

    return plan_of(script, Cluster.imagined(2, 2))


def test_exchanges_of_synchronised_batch_norm_are_in_the_plan() -> None:
    profile = Profile(sync_batch_norm=True)
    found = planned(profile, lambda: paddle.optimizer.SGD(0.1))
    assert found.profile == profile
    # Forward: a count, means and squared deviations of each rank. Backward, from the last layer: two sums per channel.
    assert found.plan.statistics == tuple(
        CollectiveSpec(kind, 4 * values, 4, flat=True)
        for kind, values in (("allgather", 25), ("allgather", 11), ("allgather", 10), ("allgather", 24))
    )


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        (lambda: paddle.optimizer.SGD(0.1), 0),
        (lambda: paddle.optimizer.Momentum(0.1), 1),
        (lambda: paddle.optimizer.Adam(0.1), 2),
        (lambda: paddle.optimizer.AdamW(0.1), 2),
    ],
)
def test_an_averaging_of_the_optimizers_state_is_in_the_plan(optimizer: Callable[[], Any], values: int) -> None:
    averaging = planned(Profile(use_local_sgd=True, local_sgd_momentum="average"), optimizer).plan.averaging
    assert averaging is not None
    assert averaging.state_values_per_parameter == values
    assert [statistic.shape for statistic in averaging.statistics] == [(12,), (12,), (5,), (5,)]
