"""Gradients that Paddle alone gets wrong, as one rank and several train them: values with two names, and bfloat16.

The reference is the same network with copies and in float32, in one process with the joint batch. The ranks run this
file, too.
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


def by_name(*networks: Network) -> dict[str, Network]:
    return {each.__name__: each for each in networks}


SHARED: dict[str, Network] = by_name(
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


def layer(values: Any, width: int = WIDTH, **options: Any) -> Any:
    return nn.Linear(values.shape[-1], width, **options)(values)


def gate(features: Any, alias: Alias) -> Any:
    del alias
    return layer(features) * F.sigmoid(layer(features))


def halves(features: Any, alias: Alias) -> Any:
    del alias
    both = layer(features, 2 * WIDTH, bias_attr=False)
    return both[:, :WIDTH] * F.sigmoid(both[:, WIDTH:])


def squares(features: Any, alias: Alias) -> Any:
    del alias
    made = layer(features, bias_attr=False)
    return made * made - 0.5 * layer(F.relu(made)) * made


def factorization(features: Any, alias: Alias) -> Any:
    del alias
    embedded = layer(features).reshape([-1, WIDTH, 1]) * layer(features, 4).unsqueeze(1)
    total = embedded.sum(1)
    return layer(total * total - (embedded * embedded).sum(1))


def attention(features: Any, alias: Alias) -> Any:
    del alias
    query, key, value = (layer(features, 16).reshape([-1, 4, 2, 2]).transpose([0, 2, 1, 3]) for _ in range(3))
    weights = F.softmax(paddle.matmul(query, key, transpose_y=True))
    return layer(paddle.matmul(weights, value).transpose([0, 2, 1, 3]).reshape([-1, 16]))


def pooled(features: Any, alias: Alias) -> Any:
    del alias
    image = nn.Conv2D(1, WIDTH, 3, padding=1)(layer(features, 16).reshape([-1, 1, 4, 4]))
    return F.adaptive_avg_pool2d(F.gelu(image * 0.5), 1).reshape([-1, WIDTH])


def channels_last(features: Any, alias: Alias) -> Any:
    del alias
    image = layer(features, 16).reshape([-1, 2, 2, 4])
    return layer(nn.Conv2D(4, WIDTH, 2, data_format="NHWC")(image).reshape([-1, WIDTH]))


def broadcast(features: Any, alias: Alias) -> Any:
    del alias
    one, row = layer(features, 1), layer(features, bias_attr=False)
    return row * one - one * 0.5 + layer(one) + (row - one)


def own_gradient_of_a_product(features: Any, alias: Alias) -> Any:
    made = layer(features, bias_attr=False)
    return layer(paddle.static.nn.static_pylayer(alias, [made], lambda gradient: gradient * 1.0)) + made


LOWERED: dict[str, Network] = by_name(
    gate,
    halves,
    squares,
    factorization,
    attention,
    pooled,
    channels_last,
    broadcast,
    own_gradient_of_a_product,
    detached,
    branch_of_what_is_read_elsewhere,
)
FEW = ("gate", "channels_last")
AMP = {
    "O1": (FEW, Profile(amp_level="O1"), SAMPLES_PER_RANK),
    "O2": (tuple(LOWERED), Profile(amp_level="O2"), SAMPLES_PER_RANK),
    "O2, one sample": ((*FEW, "halves", "broadcast", "attention"), Profile(amp_level="O2"), 1),
    "O2, recompute": (FEW, Profile(amp_level="O2", recompute_segments=2), SAMPLES_PER_RANK),
}


def values_given_out() -> dict[str, list[Any]]:
    """The dtypes of what a script fetches, and exports with Paddle's own function, of values in the middle of O2."""
    held: list[Any] = []

    def network(features: Any) -> Any:
        product = layer(features, bias_attr=False)
        held.extend([product, F.relu(product), F.relu(product) * layer(features, bias_attr=False)])
        return layer(held[-1], CLASSES)

    def minimize(inner: Any, loss: Any) -> None:
        fleet.distributed_optimizer(inner, Profile(amp_level="O2")).minimize(loss)

    many = Trained(lambda: paddle.optimizer.SGD(0.1), minimize, network)
    (batch,) = batches(1, SAMPLES_PER_RANK, 5)
    data = [operator for operator in many.main.global_block().ops if operator.name() == "pd_op.data"]
    inputs = [operator.result(0) for operator in data if operator.attrs()["name"] == "features"]
    with paddle.static.scope_guard(many.scope), paddle.static.program_guard(many.main):
        path = f"exported{fleet.worker_index()}/model"
        paddle.static.save_inference_model(path, inputs, held, many.exe, program=many.main)
        loaded, _, targets = paddle.static.load_inference_model(path, many.exe)
        exported = many.exe.run(loaded, feed={"features": batch[0]}, fetch_list=targets)
    fetched = many.step(batch, fetch=held)  # with the parameters that were exported
    return {
        "fetched": [str(each.dtype) for each in fetched],
        "exported": [str(each.dtype) for each in exported],
        "equal": [bool(np.array_equal(*pair)) for pair in zip(fetched, exported, strict=True)],
        "zero": [bool((each == 0).all()) for each in fetched],
    }


def trained(network: Network, profile: Profile, samples: int = SAMPLES_PER_RANK, floor: float = 1e-4) -> dict[str, Any]:
    """How far the first step of many differs from that of one with copies, relative to each parameter's own step, or to
    ``floor`` of the largest of them."""

    def headed(alias: Alias) -> Callable[[Any], Any]:
        return lambda features: nn.Linear(WIDTH, CLASSES)(network(features, alias))

    def sgd() -> Any:
        return paddle.optimizer.SGD(1.0)

    world, rank = fleet.worker_num(), fleet.worker_index()
    paddle.seed(3)
    many = Trained(sgd, lambda inner, loss: fleet.distributed_optimizer(inner, profile).minimize(loss), headed(itself))
    one, start = Trained(sgd, network=headed(copied)), many.state()
    one.start_from(start)
    ((features, labels),) = batches(1, samples * world, 5)
    own = slice(rank * samples, (rank + 1) * samples)
    many.step((features[own], labels[own]))
    one.step((features, labels))
    steps = [{name: values - start[name] for name, values in each.parameters().items()} for each in (many, one)]
    floor *= max(float(np.abs(wanted).max()) for wanted in steps[1].values())
    differences = {
        name: float(np.abs(steps[0][name] - wanted).max() / max(np.abs(wanted).max(), floor))
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
    report(
        fleet.worker_index(),
        shared={name: trained(network, Profile()) for name, network in SHARED.items()},
        lowered={
            how: {name: trained(LOWERED[name], profile, samples, 0.05) for name in names}
            for how, (names, profile, samples) in AMP.items()
        },
        given_out=values_given_out(),
    )


@pytest.fixture(scope="module", params=[1, 2])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    return run_ranks(Path(__file__), request.param, folder=tmp_path_factory.mktemp("gradients"), timeout_seconds=200)


@pytest.mark.parametrize("name", SHARED)
def test_what_is_read_by_another_name_keeps_its_values_and_all_of_its_gradient(ended: RanksResult, name: str) -> None:
    found = [rank[name] for rank in ended.of_all("shared")]
    assert min(each["moved"] for each in found) > 1e-3
    assert max(each["difference"] for each in found) < 1e-4
    assert len({each["state"] for each in found}) == 1, "replicas differ"


@pytest.mark.parametrize("how", AMP)
def test_bfloat16_rounds_a_gradient_and_no_more(ended: RanksResult, how: str) -> None:
    for rank in ended.of_all("lowered"):
        found = rank[how]
        assert min(each["moved"] for each in found.values()) > 1e-3
        assert {name: each["difference"] for name, each in found.items() if not each["difference"] < 0.1} == {}


def test_what_is_fetched_and_exported_of_a_lowered_program_is_float32(ended: RanksResult) -> None:
    for rank in ended.of_all("given_out"):
        assert rank["fetched"] == rank["exported"] == ["float32"] * 3
        assert (rank["equal"], rank["zero"]) == ([True] * 3, [False] * 3)


if __name__ == "__main__":
    main()
