"""The choice of bucket sizes for a profile that leaves them open."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_train.cluster import Cluster
from fleet_train.errors import ProfileError
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.build import build_chosen
from fleet_train.plan.choose import (
    MOST_BUCKETS,
    PAPER,
    WORTH_CUTTING_BYTES,
    Conditions,
    choose,
    coarse,
    link_in_words,
    needs_link,
    with_given_link,
)
from fleet_train.plan.price import NOTHING, TYPICAL, Compute, Link, Network, predict
from fleet_train.profile import Profile
from fleet_train.profile.profile import Buckets, buckets_of, open_knobs

PAIR = Cluster.imagined(2, 1)
INSIDE = Link(3e-5, 1e10 / 8)


def layers(number: int = 8, megabytes: float = 1.5) -> list[TensorSpec]:
    """Weights of one size with their biases, as the backward pass finishes them."""
    weights = [TensorSpec(f"w{i}", (int(megabytes * 2**18),), "float32") for i in range(number)]
    biases = [TensorSpec(f"b{i}", (640,), "float32") for i in range(number)]
    return [one for pair in zip(weights, biases, strict=True) for one in pair]


def over(gigabits: float, milliseconds: float = 0.2, **more: Any) -> Conditions:
    return Conditions(Network(Link(milliseconds / 1e3, gigabits * 1e9 / 8), INSIDE), **more)


def chosen(profile: Profile, conditions: Conditions, gradients: list[TensorSpec] | None = None) -> Buckets:
    return buckets_of(choose(profile, gradients or layers(), PAIR, conditions).profile)


def step(buckets: Buckets, conditions: Conditions, compute: Compute) -> float:
    """The predicted step with these numbers."""
    given = {
        "nccl_comm_num": buckets.communicators,
        "fuse_grad_size_in_MB": buckets.megabytes,
        "last_comm_group_size_MB": buckets.edge_megabytes,
    }
    plan = build_plan(layers(), PAIR, Profile(**given))
    return predict(plan, PAIR, conditions.network, compute, costs=conditions.costs).step


def test_the_default_leaves_everything_open() -> None:
    assert open_knobs(Profile()) == ("nccl_comm_num", "fuse_grad_size_in_MB", "last_comm_group_size_MB")
    with pytest.raises(ProfileError, match="nccl_comm_num: is auto, and no number was chosen for it"):
        buckets_of(Profile())
    with pytest.raises(ProfileError, match="is auto"):
        build_chosen(layers(), PAIR, Profile())


def test_what_has_no_effect_is_not_open() -> None:
    assert open_knobs(Profile(fuse_all_reduce_ops=False)) == ("nccl_comm_num",)
    assert buckets_of(Profile(fuse_all_reduce_ops=False, nccl_comm_num=3)) == Buckets(3, 0.0, 0.0)


@pytest.mark.parametrize("gigabits", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("milliseconds", [2.0, 20.0, 200.0])
def test_the_choice_is_about_the_best_of_all_that_can_be_written(gigabits: float, milliseconds: float) -> None:
    compute = Compute.of(milliseconds / 1e3)
    conditions = over(gigabits, compute=compute)
    written = [
        Buckets(communicators, size, min(edge, size))
        for communicators in (1, 2, 3, 4)
        for size in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
        for edge in (0.25, 1.0, 4.0, 32.0)
    ]
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


def test_a_slow_link_starts_early_and_a_fast_one_saves_collectives() -> None:
    slow, fast = (len(build_plan(layers(), PAIR, Profile(link_gigabits=rate)).buckets) for rate in (0.5, 1000.0))
    assert slow >= 6
    assert fast <= 2


def test_latency_is_hidden_by_communicators_or_saved_by_large_buckets() -> None:
    near, far = chosen(Profile(), over(1.0, 0.05)), chosen(Profile(), over(1.0, 20.0))
    assert far.communicators > near.communicators or far.megabytes > near.megabytes


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


def test_nothing_is_logged_if_all_sizes_are_given() -> None:
    profile = Profile(nccl_comm_num=1, fuse_grad_size_in_MB=4, last_comm_group_size_MB=1)
    choice = choose(profile, layers(), PAIR, over(1.0))
    assert choice.profile is profile
    assert choice.sentences == ()


def test_the_choice_is_logged_with_its_reason_and_explained_by_the_plan() -> None:
    choice = choose(Profile(), layers(), PAIR, over(1.0, source="measured"))
    (sentence,) = choice.sentences
    settled = buckets_of(choice.profile)
    assert sentence.startswith(f"nccl_comm_num: {settled.communicators}, fuse_grad_size_in_MB: {settled.megabytes:g}")
    assert "chosen for 1 Gb/s, 0.2 ms (measured) and 12 MB of gradients" in sentence
    notes = {note.knob: note.effect for note in build_chosen(layers(), PAIR, choice.profile).notes}
    assert notes["fuse_grad_size_in_MB"].endswith("(chosen for 1 Gb/s, 0.2 ms (measured))")
    assert notes["nccl_comm_num"].endswith("(chosen for 1 Gb/s, 0.2 ms (measured))")


def test_few_bytes_are_not_cut_and_need_no_link() -> None:
    small = [TensorSpec("w", (WORTH_CUTTING_BYTES // 4,), "float32")]
    assert chosen(Profile(), over(0.01), small).communicators == 1
    assert not needs_link(Profile(), small, PAIR)
    assert needs_link(Profile(), [*small, TensorSpec("b", (1,), "float32")], PAIR)
    assert choose(Profile(), small, PAIR, over(0.01)).sentences == ()


def test_a_link_that_is_given_is_not_measured() -> None:
    assert not needs_link(Profile(link_gigabits=1.0, link_latency_ms=0.1), layers(), PAIR)
    assert needs_link(Profile(link_gigabits=1.0), layers(), PAIR)
    assert needs_link(Profile(link_latency_ms=0.1), layers(), PAIR)
    assert not needs_link(Profile(), layers(), Cluster.imagined(1, 1))


def test_a_judged_compression_needs_the_link_although_no_number_is_open() -> None:
    given = {"nccl_comm_num": 1, "fuse_grad_size_in_MB": 4, "last_comm_group_size_MB": 1}
    profile = Profile(**given, compression="bf16")
    assert needs_link(profile, layers(), PAIR, judged={"bf16"})
    assert not needs_link(profile, layers(), PAIR, judged={"fp16"})


def test_a_given_link_is_that_of_the_job() -> None:
    asked = Profile(link_gigabits=8.0, link_latency_ms=2.0)
    network = Network(Link(1.0, 1.0), Link(2.0, 2.0))
    assert with_given_link(network, PAIR, asked) == Network(Link(2e-3, 1e9), Link(2.0, 2.0))
    assert with_given_link(network, Cluster.imagined(1, 2), asked) == Network(Link(1.0, 1.0), Link(2e-3, 1e9))


def test_the_link_in_messages_is_that_between_nodes_if_there_are_several() -> None:
    network, conditions = Network(Link(1e-3, 1e9 / 8), Link(2e-5, 1e10)), Conditions(PAPER, source="measured")
    pair, one_node = (link_in_words(network, Cluster.imagined(*of), Profile(), conditions) for of in ((2, 1), (1, 2)))
    assert (pair, one_node) == ("1 Gb/s, 1 ms (measured)", "80 Gb/s, 0.02 ms (measured)")


def test_the_engine_may_allow_one_communicator_only() -> None:
    assert chosen(Profile(), over(1.0, most_communicators=1)).communicators == 1


def test_many_gradients_make_a_bounded_number_of_buckets() -> None:
    plan = build_plan(layers(200, 1.0), PAIR, Profile(fuse_parameter_groups_size=1000))
    assert len(plan.buckets) <= MOST_BUCKETS


def test_powersgd_wants_few_buckets_where_its_factors_are_all_latency() -> None:
    dense, factors = (
        len(build_plan(matrices(), PAIR, Profile(link_gigabits=1.0, compression=name)).buckets)
        for name in ("none", "powersgd")
    )
    assert factors < dense


def matrices() -> list[TensorSpec]:
    return [TensorSpec(f"w{i}", (640, 640), "float32") for i in range(8)]


def test_the_same_is_chosen_for_links_that_were_measured_a_little_differently() -> None:
    one, other = coarse(Link(2.1e-4, 1.18e8)), coarse(Link(2.4e-4, 1.15e8))
    assert one == other
    assert one.bytes_per_second == pytest.approx(1.18e8, rel=0.13)


def test_costs_of_a_bucket_lengthen_the_step() -> None:
    compute = Compute.of(0.03)
    plan = build_plan(layers(), PAIR, Profile(nccl_comm_num=1, fuse_grad_size_in_MB=2))
    network = over(1000.0).network
    free, costly = (predict(plan, PAIR, network, compute, costs=costs).step for costs in (NOTHING, TYPICAL))
    assert costly - free >= len(plan.buckets) * TYPICAL.bucket_seconds
