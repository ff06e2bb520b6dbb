"""Gradients that Paddle alone gets wrong, as one rank and several train them: values with two names.

The reference is the same network with copies, in one process with the joint batch. The ranks run this file, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches

WIDTH, SAMPLES_PER_RANK = 8, 3
Alias = Callable[[Any], Any]
Network = Callable[[Any, Alias], Any]


def is_usual(values: Any) -> Any:
    return (values * 0).sum() < 1


def copied(values: Any) -> Any:
    return values * 1.0


def itself(values: Any) -> Any:
    return values


def hidden_of(features: Any) -> Any:
    return F.tanh(nn.Linear(FEATURES, WIDTH)(features))


def detached(features: Any, alias: Alias) -> Any:
    hidden = hidden_of(features)
    return alias(hidden).detach() + nn.Linear(WIDTH, WIDTH)(alias(hidden).detach())


def detached_and_not(features: Any, alias: Alias) -> Any:
    hidden = hidden_of(features)
    target = F.relu(alias(hidden).detach() - 0.5)
    return nn.Linear(WIDTH, WIDTH)(hidden) * target + hidden


def branch_of_what_is_read_elsewhere(features: Any, alias: Alias) -> Any:
    hidden = hidden_of(features)
    chosen = paddle.static.nn.cond(is_usual(hidden), lambda: alias(hidden), lambda: hidden * 2.0)
    return nn.Linear(WIDTH, WIDTH)(F.relu(chosen)) + hidden


def branches_in_a_branch(features: Any, alias: Alias) -> Any:
    hidden = hidden_of(features)

    def inner() -> Any:
        return paddle.static.nn.cond(is_usual(hidden), lambda: alias(hidden), lambda: hidden - 1.0)

    chosen = paddle.static.nn.cond(is_usual(hidden), inner, lambda: hidden * 2.0)
    return nn.Linear(WIDTH, WIDTH)(chosen) * hidden


def one_result_twice(features: Any, alias: Alias) -> Any:
    hidden = hidden_of(features)

    def branch() -> Any:
        made = F.sigmoid(hidden)
        return made, alias(made)

    first, second = paddle.static.nn.cond(is_usual(hidden), branch, lambda: (hidden, alias(hidden)))
    return F.relu(first) + nn.Linear(WIDTH, WIDTH)(second) + hidden


def parameter_from_a_branch(features: Any, alias: Alias) -> Any:
    one, two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    hidden = hidden_of(features)
    bias = paddle.static.nn.cond(is_usual(hidden), lambda: alias(one.bias), lambda: alias(two.bias))
    return one(hidden) + two(hidden) + bias


def case_of_two(features: Any, alias: Alias) -> Any:
    hidden = hidden_of(features)
    chosen = paddle.static.nn.case([(is_usual(hidden), lambda: alias(hidden))], default=lambda: hidden * 3.0)
    return nn.Linear(WIDTH, WIDTH)(chosen * hidden)


def own_gradient(features: Any, alias: Alias) -> Any:
    hidden = hidden_of(features)
    passed = paddle.static.nn.static_pylayer(alias, [hidden], lambda gradient: gradient * 0.5)
    return F.relu(passed) + nn.Linear(WIDTH, WIDTH)(hidden)


def flattened(features: Any, alias: Alias) -> Any:
    hidden = alias(hidden_of(features))
    return hidden.flatten_().reshape_([-1, WIDTH]) * hidden + F.relu_(hidden.unsqueeze_(0).squeeze_(0))


SHARED: dict[str, Network] = {
    each.__name__: each
    for each in (
        detached,
        detached_and_not,
        branch_of_what_is_read_elsewhere,
        branches_in_a_branch,
        one_result_twice,
        parameter_from_a_branch,
        case_of_two,
        own_gradient,
        flattened,
    )
}


def trained(network: Network, profile: Profile) -> dict[str, Any]:
    """How far the first step of many differs from that of one with copies, relative to each parameter's own step."""

    def headed(alias: Alias) -> Callable[[Any], Any]:
        return lambda features: nn.Linear(WIDTH, CLASSES)(network(features, alias))

    def sgd() -> Any:
        return paddle.optimizer.SGD(1.0)

    world, rank = fleet.worker_num(), fleet.worker_index()
    paddle.seed(3)
    many = Trained(sgd, lambda inner, loss: fleet.distributed_optimizer(inner, profile).minimize(loss), headed(itself))
    one, start = Trained(sgd, network=headed(copied)), many.state()
    one.start_from(start)
    ((features, labels),) = batches(1, SAMPLES_PER_RANK * world, 5)
    own = slice(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK)
    many.step((features[own], labels[own]))
    one.step((features, labels))
    steps = [{name: values - start[name] for name, values in each.parameters().items()} for each in (many, one)]
    differences = {
        name: float(np.abs(steps[0][name] - wanted).max() / max(np.abs(wanted).max(), 1e-4))
        for name, wanted in steps[1].items()
    }
    return {
        "difference": max(differences.values()),
        "moved": max(float(np.abs(wanted).max()) for wanted in steps[1].values()),
        "state": digest(many.state()),
    }


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    report(fleet.worker_index(), shared={name: trained(network, Profile()) for name, network in SHARED.items()})


@pytest.fixture(scope="module", params=[1, 2])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    return run_ranks(Path(__file__), request.param, folder=tmp_path_factory.mktemp("gradients"), timeout_seconds=200)


@pytest.mark.parametrize("name", SHARED)
def test_what_is_read_by_another_name_keeps_its_values_and_all_of_its_gradient(ended: RanksResult, name: str) -> None:
    found = [rank[name] for rank in ended.of_all("shared")]
    assert min(each["moved"] for each in found) > 1e-3
    assert max(each["difference"] for each in found) < 1e-4
    assert len({each["state"] for each in found}) == 1, "replicas differ"


if __name__ == "__main__":
    main()
