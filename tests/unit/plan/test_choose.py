"""The choice of bucket sizes for a profile that leaves them open, and the link measured for it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from click.testing import CliRunner

from fleet_train.cli.plan import command
from fleet_train.cluster import Cluster
from fleet_train.errors import ClusterError, ProfileError
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.build import build_chosen
from fleet_train.plan.choose import (
    MOST_BUCKETS,
    WORTH_CUTTING_BYTES,
    ChoiceConditions,
    Sample,
    choose,
    coarse,
    fit,
    needs_link,
)
from fleet_train.plan.price import Compute, Link, Network, predict, with_given_link
from fleet_train.profile import Profile
from fleet_train.profile.profile import Buckets, buckets_of, open_knobs

PAIR = Cluster.imagined(2, 1)
INSIDE = Link(3e-5, 1e10 / 8)


def layers(number: int = 8, megabytes: float = 1.5) -> list[TensorSpec]:
    """Weights of one size with their biases, as the backward pass finishes them."""
    weights = [TensorSpec(f"w{i}", (int(megabytes * 2**18),), "float32") for i in range(number)]
    biases = [TensorSpec(f"b{i}", (640,), "float32") for i in range(number)]
    return [one for pair in zip(weights, biases, strict=True) for one in pair]


def over(gigabits: float, milliseconds: float = 0.2, **more: Any) -> ChoiceConditions:
    return ChoiceConditions(Network(Link(milliseconds / 1e3, gigabits * 1e9 / 8), INSIDE), **more)


def chosen(profile: Profile, conditions: ChoiceConditions, gradients: list[TensorSpec] | None = None) -> Buckets:
    return buckets_of(choose(profile, gradients or layers(), PAIR, conditions).profile)


def step(buckets: Buckets, conditions: ChoiceConditions, compute: Compute) -> float:
    """The predicted step with these numbers."""
    given = {
        "nccl_comm_num": buckets.communicators,
        "fuse_grad_size_in_MB": buckets.megabytes,
        "last_comm_group_size_MB": buckets.edge_megabytes,
    }
    plan = build_plan(layers(), PAIR, Profile(**given))
    return predict(plan, PAIR, conditions.network, compute, costs=conditions.costs).step


@pytest.mark.parametrize(("gigabits", "milliseconds"), [(0.1, 200.0), (1.0, 2.0), (1.0, 200.0), (10.0, 2.0)])
def test_the_choice_is_about_the_best_of_all_that_can_be_written(gigabits: float, milliseconds: float) -> None:
    compute = Compute.of(milliseconds / 1e3)
    conditions = over(gigabits, compute=compute)
    sizes, edges = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0), (0.25, 1.0, 4.0, 32.0)
    written = [Buckets(number, size, min(edge, size)) for number, size, edge in product((1, 2, 3, 4), sizes, edges)]
    best = min(step(one, conditions, compute) for one in written)
    assert step(chosen(Profile(), conditions), conditions, compute) <= 1.01 * best + 1e-9


@pytest.mark.parametrize("gigabits", [0.1, 1.0, 10.0])
def test_without_a_computing_time_no_choice_is_far_from_the_best(gigabits: float) -> None:
    for milliseconds in (5.0, 50.0, 500.0):
        compute = Compute.of(milliseconds / 1e3)
        blind, seeing = (
            step(chosen(Profile(), conditions), conditions, compute)
            for conditions in (over(gigabits), over(gigabits, compute=compute))
        )
        assert blind <= 1.08 * seeing


@pytest.mark.parametrize(
    "given",
    [
        {"nccl_comm_num": 3},
        {"fuse_grad_size_in_MB": 7.5},
        {"last_comm_group_size_MB": 3.0},
        {"fuse_grad_size_in_MB": 0.1},
        {"nccl_comm_num": 1, "fuse_grad_size_in_MB": 5.0, "last_comm_group_size_MB": 0.5},
    ],
)
def test_a_number_that_is_given_is_obeyed(given: dict[str, Any]) -> None:
    for gradients in (layers(), layers(1, 0.01)):
        settled = choose(Profile(**given), gradients, PAIR, over(1.0)).profile
        assert {name: getattr(settled, name) for name in given} == given
        found = buckets_of(settled)
        assert found.edge_megabytes <= found.megabytes


def test_few_bytes_are_not_cut_and_need_no_link() -> None:
    small = [TensorSpec("w", (WORTH_CUTTING_BYTES // 4,), "float32")]
    assert chosen(Profile(), over(0.01), small).communicators == 1
    assert choose(Profile(), small, PAIR, over(0.01)).sentences == ()
    more = [*small, TensorSpec("b", (1,), "float32")]
    assert [needs_link(Profile(), gradients, PAIR) for gradients in (small, more)] == [False, True]
    assert not needs_link(Profile(), more, Cluster.imagined(1, 1))
    assert not needs_link(Profile(link_gigabits=1.0, link_latency_ms=0.1), more, PAIR)
    assert needs_link(Profile(link_gigabits=1.0), more, PAIR)
    assert needs_link(Profile(link_latency_ms=0.1), more, PAIR)


def test_a_given_link_is_that_of_the_job() -> None:
    asked = Profile(link_gigabits=8.0, link_latency_ms=2.0)
    network = Network(Link(1.0, 1.0), Link(2.0, 2.0))
    assert with_given_link(network, PAIR, asked) == Network(Link(2e-3, 1e9), Link(2.0, 2.0))
    assert with_given_link(network, Cluster.imagined(1, 2), asked) == Network(Link(1.0, 1.0), Link(2e-3, 1e9))


def test_few_buckets_are_made_where_all_is_latency_and_never_more_than_are_worth_it() -> None:
    matrices = [TensorSpec(f"w{i}", (640, 640), "float32") for i in range(8)]
    plans = [build_plan(matrices, PAIR, Profile(link_gigabits=1.0, compression=name)) for name in ("none", "powersgd")]
    assert len(plans[1].buckets) < len(plans[0].buckets)
    many = build_plan(layers(200, 1.0), PAIR, Profile(fuse_parameter_groups_size=1000))
    assert len(many.buckets) <= MOST_BUCKETS
    assert chosen(Profile(), over(1.0, most_communicators=1)).communicators == 1
    near, far = chosen(Profile(), over(1.0, 0.05)), chosen(Profile(), over(1.0, 20.0))
    assert far.communicators > near.communicators or far.megabytes > near.megabytes


def samples(latency: float, rate: float, ranks: int, noise: float = 0.0) -> list[Sample]:
    found = []
    for nbytes, sign in ((4096, 1), (65536, -1), (1048576, 1), (4194304, -1)):
        seconds = 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * nbytes / rate
        found.append(Sample(nbytes, seconds * (1 + noise * sign)))
    return found


def test_one_disturbed_size_moves_neither_number() -> None:
    clean = samples(1e-4, 125e6, 2)
    middle = [Sample(16384, 1e-2), Sample(262144, 0.1), Sample(8192, 2e-4 + 8192 / 125e6)]
    found = fit([*clean, *middle], 2)
    assert found.link.latency_seconds == pytest.approx(1e-4, rel=0.01)
    assert found.link.bytes_per_second == pytest.approx(125e6, rel=0.01)


def test_neither_number_is_ever_negative() -> None:
    shrinking = fit([Sample(4096, 2e-3), Sample(65536, 1e-3), Sample(1048576, 1e-3)], 2).link
    steep = fit([Sample(4096, 1e-6), Sample(1048576, 1e-2), Sample(4194304, 1e-1)], 2).link
    assert all(link.latency_seconds >= 0 and link.bytes_per_second > 0 for link in (shrinking, steep))


def test_a_measured_link_is_put_on_a_grid_of_doubled_latencies_and_bandwidths_a_quarter_apart() -> None:
    found = coarse(Link(1e-4, 1e8))
    # 1 / 8192 s is the power of two nearest to 0.1 ms; 1.25 ** 82.5 is 1e8, and 83 the whole number next to it.
    assert found.latency_seconds == 1 / 8192
    assert found.bytes_per_second == pytest.approx(1.25**83)
    assert coarse(Link(1.2e-4, 1.05e8)) == found == coarse(found)
    assert coarse(Link(2e-4, 1e8)).latency_seconds == 1 / 4096


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --script SCRIPT or --model mlp|cnn"),
        (["--model", "mlp", "more"], "unexpected 'more': arguments go with --script"),
        (["--model", "mlp", "--nodes_on_paper", "8"], "No such option '--nodes_on_paper': plan for each number of"),
        (["--model", "mlp", "--simulate_steps", "5"], "--simulate_steps needs --simulate: give both"),
        (["--measure"], "No such option '--measure': fleet_train recommend measures the links for what it"),
        (["--measure_seconds", "5"], "give them here as --latency_us and --bandwidth_mbps"),
    ],
)
def test_usage_errors_say_what_was_given(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_default_leaves_everything_open_that_has_an_effect() -> None:
    assert open_knobs(Profile()) == ("nccl_comm_num", "fuse_grad_size_in_MB", "last_comm_group_size_MB")
    with pytest.raises(ProfileError, match="nccl_comm_num: is auto, and no number was chosen for it"):
        buckets_of(Profile())
    with pytest.raises(ProfileError, match="is auto"):
        build_chosen(layers(), PAIR, Profile())
    assert open_knobs(Profile(fuse_all_reduce_ops=False)) == ("nccl_comm_num",)
    assert buckets_of(Profile(fuse_all_reduce_ops=False, nccl_comm_num=3)) == Buckets(3, 0.0, 0.0)
    given = Profile(nccl_comm_num=1, fuse_grad_size_in_MB=4, last_comm_group_size_MB=1)
    choice = choose(given, layers(), PAIR, over(1.0))
    assert (choice.profile, choice.sentences) == (given, ())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-6), (0.05, 0.1)])
def test_times_give_latency_and_bandwidth_back(ranks: int, noise: float, tolerance: float) -> None:
    found = fit(samples(1e-4, 125e6, ranks, noise), ranks)
    assert found.link.latency_seconds == pytest.approx(1e-4, rel=tolerance)
    assert found.link.bytes_per_second == pytest.approx(125e6, rel=tolerance)
    assert found.error < max(2 * noise, 1e-9)
    with pytest.raises(ClusterError, match="1 buffer size measured: latency and bandwidth need two at least"):
        fit([Sample(4096, 1e-3)], ranks)
