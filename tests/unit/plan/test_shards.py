"""Which rank owns what of a sharded optimizer, what is sent for it, and how much memory that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_train.cluster import Cluster
from fleet_train.convert.sharding import in_order_of_sums
from fleet_train.errors import ProfileError
from fleet_train.plan import CommPlan, TensorSpec, build_plan, explain
from fleet_train.plan.choose import OWNERS_BUCKETS
from fleet_train.plan.shards import MOST_UNEVEN, elements_of, memory_of, rows_cut
from fleet_train.plan.trial import try_out
from fleet_train.profile import Profile

LAYERS = [("head.w", (1024, 10)), ("head.b", (10,)), ("deep.w", (700, 512)), ("deep.b", (512,)), ("wide.w", (784, 700))]


def gradients(is_whole: bool = False, dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(name, shape, dtype, is_whole) for name, shape in LAYERS]


def plan_of(specs: list[TensorSpec], nodes: int, per_node: int = 1, **knobs: Any) -> tuple[CommPlan, Profile]:
    profile = Profile(sharding=True, **knobs)
    return build_plan(specs, Cluster.imagined(nodes, per_node), profile, state_values_per_parameter=2), profile


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
@pytest.mark.parametrize("knobs", [{}, {"fuse_all_reduce_ops": False}, {"fuse_grad_size_in_MB": 1.0}])
def test_every_value_has_one_owner_and_buckets_are_even(nodes: int, knobs: dict[str, Any]) -> None:
    plan, _ = plan_of(gradients(), nodes, **knobs)
    assert plan.owners == nodes
    for bucket in plan.buckets:
        seen = [np.zeros(gradient.shape, int) for gradient in bucket.gradients]
        for pieces in bucket.shards:
            for piece in pieces:
                rows = slice(piece.first, piece.first + piece.rows) if piece.rows else slice(None)
                seen[piece.gradient][rows] += 1
        assert all((values == 1).all() for values in seen)
        sizes = [sum(spec.elements for spec in bucket.owned_by(member)) for member in range(nodes)]
        assert max(sizes) == bucket.part_elements
        # A bias of ten has no more rows than that.
        assert max(sizes) <= max(MOST_UNEVEN * bucket.elements / nodes, 10)
    assert sum(elements_of(plan)) == sum(spec.elements for spec in gradients())


def test_only_what_would_be_uneven_is_cut_and_named() -> None:
    even = [TensorSpec(f"w{index}", (64, 64), "float32") for index in range(4)]
    plan, _ = plan_of(even, 4)
    assert rows_cut(plan) == []
    assert "no parameter is cut" in explain(plan)
    plan, _ = plan_of([*even, TensorSpec("large", (640, 64), "float32")], 4)
    assert rows_cut(plan) == ["large"]
    assert "cut by rows: large" in explain(plan)


def test_what_is_updated_as_a_whole_is_never_cut_but_shares_a_bucket() -> None:
    """Alone, a parameter would leave all other owners of its bucket without anything to do."""
    specs = [TensorSpec(f"w{index}", (64, 64), "float32", is_whole=True) for index in range(8)]
    plan, _ = plan_of(specs, 4, fuse_all_reduce_ops=False)
    assert rows_cut(plan) == []
    assert [len(bucket.gradients) for bucket in plan.buckets] == [4, 4]
    plan, _ = plan_of([*gradients(is_whole=True), replace(specs[0], dtype="float64")], 2, fuse_all_reduce_ops=False)
    assert [len(bucket.gradients) for bucket in plan.buckets] == [5, 1]


@pytest.mark.parametrize(
    ("knobs", "sent"),
    [
        ({}, 2 * 3 / 4),
        ({"compression": "bf16"}, 1.5 * 3 / 4),
        ({"sharding_degree": 2}, 2 * 1 / 2 + 1 / 2),  # to one other, from one other, and half with the other pair
    ],
)
def test_bytes_are_those_of_an_allreduce_or_fewer(knobs: dict[str, Any], sent: float) -> None:
    plan, profile = plan_of(gradients(), 2, 2, fuse_grad_size_in_MB=1.0, **knobs)
    padded = sum(bucket.part_elements * len(bucket.shards) for bucket in plan.buckets)
    assert plan.sent_bytes_per_step == pytest.approx(4 * padded * sent)
    assert padded < MOST_UNEVEN * sum(spec.elements for spec in gradients())
    trial = try_out(plan, profile, 3)
    assert trial.holds


def test_memory_is_that_of_the_largest_share() -> None:
    plan, _ = plan_of(gradients(), 4)
    whole = build_plan(gradients(), Cluster.imagined(4, 1), Profile(), state_values_per_parameter=2)
    nbytes = 4.0 * sum(spec.elements for spec in gradients())
    ours, all_of_it = memory_of(plan), memory_of(whole)
    assert all_of_it["parameters"] == all_of_it["gradients"] == nbytes == all_of_it["state"] / 2
    assert ours["parameters"] == nbytes
    assert ours["state"] == 2 * ours["gradients"] == pytest.approx(2 * 4 * max(elements_of(plan)))
    assert ours["state"] < 0.27 * all_of_it["state"]
    single = build_plan(gradients(), Cluster.imagined(1, 1), Profile(sharding=True), state_values_per_parameter=2)
    assert (single.owners, memory_of(single)["buffers"]) == (0, 0)


def test_open_sizes_of_buckets_stay_small() -> None:
    specs = [TensorSpec(f"w{index}", (256, 1024), "float32") for index in range(64)]
    plan, _ = plan_of(specs, 4)
    assert max(bucket.nbytes for bucket in plan.buckets) <= sum(spec.nbytes for spec in specs) / OWNERS_BUCKETS


def test_small_parameters_go_with_a_large_one() -> None:
    layers = [(f"b{index}", f"w{index}") for index in range(4)]
    specs = [TensorSpec(n, (1024,) if n in b else (1024, 1024), "float32") for b, w in layers for n in (b, w)]
    plan, _ = plan_of(specs, 4)
    weights = [sum(gradient.name.startswith("w") for gradient in bucket.gradients) for bucket in plan.buckets]
    assert weights[1:] == [1] * len(weights[1:])


@pytest.mark.parametrize(
    ("communicators", "order"),
    # Sizes 4, 2, 1, 5, 1: one after another; 4, 1, 1 beside 2, 5; 4, 5 beside 2, 1 and 1; 4, 1 beside 2 and 1 and 5.
    [(1, [0, 1, 2, 3, 4]), (2, [0, 1, 2, 4, 3]), (3, [0, 1, 2, 4, 3]), (4, [0, 2, 1, 4, 3])],
)
def test_of_the_last_sums_the_first_to_arrive_is_updated_first(communicators: int, order: list[int]) -> None:
    specs = [TensorSpec(f"w{index}", (256 * size, 64), "float32") for index, size in enumerate((4, 2, 1, 5, 1))]
    plan, _ = plan_of(specs, 4, fuse_all_reduce_ops=False, nccl_comm_num=communicators)
    assert [bucket.index for bucket in in_order_of_sums(plan)] == order


@pytest.mark.parametrize(
    ("specs", "knobs", "words"),
    [
        (gradients(), {"sharding_degree": 3}, "sharding_degree: 3 does not divide the number of ranks, 4"),
        ([TensorSpec("w", (1,), "float32")], {}, "rank 1 would own nothing of the 1 parameters"),
    ],
)
def test_what_cannot_be_shared_is_refused(specs: list[TensorSpec], knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        plan_of(specs, 4, **knobs)
