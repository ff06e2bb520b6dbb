"""What the plan makes of its settings: hand-computed buckets and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_train.cluster import Cluster
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.plan import CommPlan, TensorSpec, build_plan
from fleet_train.plan.build import fuse
from fleet_train.plan.price import Compute, Link, Network, predict
from fleet_train.plan.pricing import averaging_bytes, traffic
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import CollectiveSpec
from fleet_train.profile.profile import Buckets

CLUSTER = Cluster.imagined(2, 1)
MEGABYTE = 2**20


def plan_of(*elements: int, **knobs: object) -> CommPlan:
    gradients = [TensorSpec(f"w{index}", (number,), "float32") for index, number in enumerate(elements)]
    return build_plan(gradients, CLUSTER, Profile(**knobs))  # type: ignore[arg-type]


def test_first_bucket_keeps_both_bounds() -> None:
    gradients = [TensorSpec(f"w{index}", (MEGABYTE // 8,), "float32") for index in range(4)]  # of half a megabyte each
    for size, edge, sizes in ((4.0, 0.5, [1, 2, 1]), (1.0, 4.0, [2, 2]), (1.0, 1.0, [2, 2])):
        assert [len(bucket) for bucket in fuse(gradients, Buckets(1, size, edge), 100)] == sizes, (size, edge)


def test_dgc_is_planned_with_the_bytes_behind_its_ramp() -> None:
    beside = {"dgc_min_elements": 1000, "dgc_rampup_begin_step": 3, "dgc_rampup_steps": 4}
    plan = plan_of(100_000, 500, compression="dgc", dgc_sparsity=0.999, **beside)
    # 100 of 100000 elements are left, each a value and its place; the ramp begins with a quarter of them.
    assert [bucket.sent for bucket in plan.buckets] == [
        (CollectiveSpec("allgather", 800, 8),),
        (CollectiveSpec("allreduce", 2000, 4),),
    ]


def test_headers_are_divided_by_the_period_as_the_payload_is() -> None:
    cluster = Cluster.imagined(2, 1)
    plan = plan_of(MEGABYTE, use_local_sgd=True, local_sgd_steps=8)
    # Of each node: 4 messages of 96 bytes out, 4 answers of 48 bytes.
    assert traffic(plan, cluster, warm_up=True).protocol == (576.0, 576.0)
    assert traffic(plan, cluster).protocol == (72.0, 72.0)
    found = traffic(plan, cluster)
    assert found.sent == found.leaving == found.entering == (MEGABYTE / 2, MEGABYTE / 2)
    assert averaging_bytes(plan) == [(4.0 * MEGABYTE, 4.0 * MEGABYTE)]


def test_an_averaging_hides_behind_every_micro_batch_of_its_overlap() -> None:
    network, slow = Network(Link(1e-3, 1e8), Link(1e-4, 1e9)), Compute(0.002, 0.004)
    plan = plan_of(250_000, use_local_sgd=True, local_sgd_steps=8, local_sgd_overlap_steps=1, nccl_comm_num=1)
    # 2 rounds of 1 ms and 1 MB at 100 MB/s are 12 ms; a micro-batch takes 6 ms.
    assert predict(plan, CLUSTER, network, slow).exposed == pytest.approx(0.006 / 8)
    assert predict(replace(plan, accumulate_steps=2), CLUSTER, network, slow).exposed == 0.0


def test_only_an_averaged_state_of_the_optimizer_is_sent() -> None:
    weight = TensorSpec("w", (1000,), "float32")
    sent = {}
    for rule in ("keep", "reset", "average"):
        profile = Profile(use_local_sgd=True, local_sgd_momentum=rule)
        averaging = build_plan([weight], CLUSTER, profile, state_values_per_parameter=2).averaging
        assert averaging is not None
        sent[rule] = [one.nbytes for one in averaging.sent]
    assert sent == {"keep": [4000], "reset": [4000], "average": [4000, 8000]}


def test_local_groups_of_an_asked_size_that_divides_the_ranks() -> None:
    profile = Profile(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2)
    assert build_plan([TensorSpec("w", (8,), "float32")], Cluster.imagined(1, 4), profile).group_size == 2
    with pytest.raises(ProfileError, match="inter_nranks=2 does not divide the world size, 5"):
        build_plan([TensorSpec("w", (8,), "float32")], Cluster.imagined(1, 5), profile)


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ("local_sgd_dtype", "local_sgd_dtype: new has no bytes in the plan"),
        ("local_sgd_momentum", "local_sgd_momentum: new has no rule"),
    ],
)
def test_no_averaging_is_planned_of_a_choice_that_only_the_schema_knows(knob: str, message: str) -> None:
    profile = Profile(use_local_sgd=True).model_copy(update={knob: "new"})
    with pytest.raises(ConversionError, match=message):
        build_plan([TensorSpec("w", (8,), "float32")], CLUSTER, profile)
