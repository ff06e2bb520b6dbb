"""The plan: which gradients share a bucket, what it costs, and how two plans differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fleet_train.cluster import Cluster
from fleet_train.errors import ConversionError
from fleet_train.plan import TensorSpec, build_plan, first_difference
from fleet_train.plan.plan import CommPlan, by_mean_dtype
from fleet_train.profile import Profile

CLUSTER = Cluster.imagined(nodes=2, ranks_per_node=1)
MEGABYTE = 2**20


def gradients(*megabytes: float, dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(f"p{i}", (int(size * MEGABYTE / 4),), dtype) for i, size in enumerate(megabytes)]


def buckets_of(plan: CommPlan) -> list[list[str]]:
    return [[gradient.name for gradient in bucket.gradients] for bucket in plan.buckets]


BOUNDED = {"fuse_grad_size_in_MB": 4.0, "last_comm_group_size_MB": 1.0}
LARGE = {"fuse_grad_size_in_MB": 16.0, "last_comm_group_size_MB": 1.0}


@pytest.mark.parametrize(
    ("sizes", "knobs", "buckets"),
    [
        ((1, 2, 2, 2, 1), BOUNDED, ["p0", "p1 p2", "p3", "p4"]),  # filled in the order of readiness
        ((0.5, 0.5, 3, 3, 0.5), LARGE, ["p0 p1", "p2 p3", "p4"]),  # the first and the last are small
        ((1, 10, 1), BOUNDED, ["p0", "p1", "p2"]),  # larger than the bound
        ([0.01] * 5, {"fuse_parameter_groups_size": 2}, ["p0 p1", "p2 p3", "p4"]),
        ((1, 1, 1), {"fuse_all_reduce_ops": False}, ["p0", "p1", "p2"]),
    ],
)
def test_gradients_share_buckets(sizes: Sequence[float], knobs: dict[str, Any], buckets: list[str]) -> None:
    found = buckets_of(build_plan(gradients(*sizes), CLUSTER, Profile(**knobs)))
    assert found == [names.split() for names in buckets]


def test_dtypes_do_not_share_a_bucket_and_communicators_take_turns() -> None:
    mixed = [TensorSpec("a", (4,), "float32"), TensorSpec("b", (4,), "float64"), TensorSpec("c", (4,), "float32")]
    assert buckets_of(build_plan(mixed, CLUSTER, Profile())) == [["b"], ["a", "c"]]
    plan = build_plan(gradients(1, 1, 1), CLUSTER, Profile(nccl_comm_num=2, fuse_all_reduce_ops=False))
    assert [bucket.communicator for bucket in plan.buckets] == [0, 1, 0]


def test_dtype_without_a_size_is_refused() -> None:
    assert TensorSpec("scalar", (), "float32").nbytes == 4
    with pytest.raises(ConversionError, match="gradient of 'a': dtype float8_e4m3fn cannot be communicated"):
        _ = TensorSpec("a", (4,), "float8_e4m3fn").nbytes


def test_a_digest_is_of_what_is_communicated_and_not_of_the_profiles_name() -> None:
    profiles = (Profile(nccl_comm_num=number, name=name) for number, name in ((1, "a"), (1, "b"), (2, "a")))
    one, again, other = (build_plan(gradients(1, 1), CLUSTER, profile) for profile in profiles)
    assert one.digest == again.digest != other.digest
    assert first_difference(one.to_json(), again.to_json()) is None


def test_first_difference_names_the_gradient_and_both_shapes() -> None:
    profile = Profile(nccl_comm_num=1, last_comm_group_size_MB=1.0)
    ours = build_plan(gradients(1, 1), CLUSTER, profile).to_json()
    theirs = build_plan(gradients(1, 0.5), CLUSTER, profile).to_json()
    assert first_difference(ours, theirs) == (
        "'p1' [262144] float32 in bucket 1 (allreduce, communicator 0) here, "
        "'p1' [131072] float32 in bucket 1 (allreduce, communicator 0) there"
    )


def test_a_missing_gradient_and_another_world_size_are_differences() -> None:
    profile = Profile(nccl_comm_num=1, fuse_all_reduce_ops=False)
    ours = build_plan(gradients(1, 1), CLUSTER, profile).to_json()
    theirs = build_plan(gradients(1), CLUSTER, profile).to_json()
    assert first_difference(ours, theirs) == "'p1' [262144] float32 in bucket 1 (allreduce, communicator 0) here only"
    assert first_difference(theirs, ours) == "'p1' [262144] float32 in bucket 1 (allreduce, communicator 0) there only"
    larger = build_plan(gradients(1), Cluster.imagined(3, 1), profile).to_json()
    assert first_difference(theirs, larger) == "world_size is 2 here, 3 there"


def test_what_is_averaged_is_a_difference() -> None:
    knobs = {"use_local_sgd": True, "local_sgd_steps": 4}
    ours = build_plan(gradients(1, 1), CLUSTER, Profile(**knobs)).to_json()
    theirs = ours | {"averaging": None}
    words = "2 parameters, 0 statistics and 0 values of the optimizer's state per parameter, every 4 steps"
    assert first_difference(ours, theirs) == f"what LocalSGD averages: {words} here, nothing there"
    assert first_difference(theirs, ours) == f"what LocalSGD averages: nothing here, {words} there"
    later = ours | {"statistics": [{"nbytes": 8}, {"nbytes": 4}]}
    assert first_difference(ours, later) == ("exchanges inside the passes: 0 of 0 bytes here, 2 of 12 bytes there")


def test_means_of_float64_are_taken_in_float64_and_all_others_in_float32() -> None:
    assert by_mean_dtype(["float16", "float64", "float32", "float64"]) == {"float32": [0, 2], "float64": [1, 3]}
    assert list(by_mean_dtype(["float64", "float32"])) == ["float32", "float64"]


@pytest.mark.parametrize(
    ("knobs", "is_quantised"),
    [
        ({}, False),
        ({"compression": "int8"}, True),
        ({"compression": "bf16"}, False),
        ({"use_local_sgd": True}, False),
        ({"use_local_sgd": True, "local_sgd_dtype": "int4"}, True),
    ],
)
def test_few_bits_travel_with_gradients_or_with_averagings(knobs: dict[str, object], is_quantised: bool) -> None:
    assert build_plan(gradients(1), CLUSTER, Profile(**knobs)).is_quantised == is_quantised  # type: ignore[arg-type]
