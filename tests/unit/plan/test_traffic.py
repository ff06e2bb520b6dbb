from __future__ import annotations

from fleet_train.cluster import Cluster
from fleet_train.plan import CommPlan, TensorSpec, build_plan, explain
from fleet_train.plan.phases import CollectivePhase
from fleet_train.plan.pricing import traffic
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import CollectiveSpec

MEGABYTE = 2**20


def plan_of(cluster: Cluster, megabytes: float = 4, **knobs: object) -> CommPlan:
    gradients = [TensorSpec("w", (int(megabytes * MEGABYTE / 4),), "float32")]
    return build_plan(gradients, cluster, Profile(**knobs))  # type: ignore[arg-type]


def test_flat_ring_on_two_nodes_of_two_ranks() -> None:
    cluster = Cluster.imagined(2, 2)
    found = traffic(plan_of(cluster), cluster)
    assert found.sent == (6 * MEGABYTE,) * 4
    assert found.leaving == found.entering == found.inside == (6 * MEGABYTE,) * 2


def test_hierarchical_sends_less_between_nodes_and_more_inside() -> None:
    cluster = Cluster.imagined(2, 2)
    found = traffic(plan_of(cluster, use_hierarchical_allreduce=True), cluster)
    assert found.sent == (10 * MEGABYTE, 4 * MEGABYTE, 10 * MEGABYTE, 4 * MEGABYTE)
    assert found.leaving == found.entering == (4 * MEGABYTE,) * 2
    assert found.inside == (10 * MEGABYTE,) * 2
    assert found.most_sent == 10 * MEGABYTE


def test_hierarchical_is_three_phases_in_the_order_in_which_they_run() -> None:
    cluster = Cluster.imagined(2, 2)
    plan = plan_of(cluster, use_hierarchical_allreduce=True)
    assert plan.phases() == [
        CollectivePhase("reduce", ((0, 1), (2, 3)), 4 * MEGABYTE, 4),
        CollectivePhase("allreduce", ((0, 2),), 4 * MEGABYTE, 4),
        CollectivePhase("broadcast", ((0, 1), (2, 3)), 4 * MEGABYTE, 4),
    ]


def test_local_sgd_divides_an_averaging_by_its_period_and_warm_up_is_apart() -> None:
    cluster = Cluster.imagined(2, 1)
    plan = plan_of(cluster, use_local_sgd=True, local_sgd_steps=8)
    assert traffic(plan, cluster).sent == (MEGABYTE / 2,) * 2
    assert traffic(plan, cluster, warm_up=True).sent == (4 * MEGABYTE,) * 2


def test_local_sgd_in_bfloat16_halves_the_bytes() -> None:
    cluster = Cluster.imagined(2, 1)
    plan = plan_of(cluster, use_local_sgd=True, local_sgd_steps=8, local_sgd_dtype="bfloat16")
    assert traffic(plan, cluster).sent == (MEGABYTE / 4,) * 2


def test_one_node_has_nothing_leaving() -> None:
    cluster = Cluster.imagined(1, 2)
    found = traffic(plan_of(cluster), cluster)
    assert (found.leaving, found.protocol, found.inside) == ((0.0,), (0.0,), (8 * MEGABYTE,))


def test_protocol_bytes_are_counted_apart() -> None:
    cluster = Cluster.imagined(2, 1)
    # 4 messages of 96 bytes out, 4 answers of 48 bytes.
    assert traffic(plan_of(cluster), cluster).protocol == (576.0, 576.0)


def test_what_leaves_all_nodes_enters_them() -> None:
    cluster = Cluster.imagined(5, 3)
    found = traffic(plan_of(cluster, use_hierarchical_allreduce=True), cluster)
    assert sum(found.leaving) == sum(found.entering)
    assert sum(found.sent) == sum(found.leaving) + sum(found.inside)


def test_statistics_of_batch_norm_are_sent_flat_once_per_micro_batch() -> None:
    cluster = Cluster.imagined(2, 2)
    gradients = [TensorSpec("w", (MEGABYTE,), "float32")]
    statistics = (CollectiveSpec("allgather", 100, 4, flat=True), CollectiveSpec("allreduce", 96, 4, flat=True))
    profile = Profile(use_hierarchical_allreduce=True, sync_batch_norm=True, accumulate_steps=2)
    plan = build_plan(gradients, cluster, profile, statistics=statistics)
    without = build_plan(gradients, cluster, profile)
    more = [one - other for one, other in zip(plan.sent_by_rank(), without.sent_by_rank(), strict=True)]
    assert more == [2 * (3 * 100 + 1.5 * 96)] * 4
    assert "4 collectives, not overlapped" in explain(plan)
    assert plan.digest != without.digest


def test_an_averaging_counts_statistics_in_float32_and_the_optimizers_state() -> None:
    cluster = Cluster.imagined(2, 1)
    weight, mean = TensorSpec("w", (1000,), "float32"), TensorSpec("mean", (10,), "float32")
    profile = Profile(use_local_sgd=True, local_sgd_steps=5, local_sgd_dtype="bfloat16", local_sgd_momentum="average")
    plan = build_plan([weight], cluster, profile, [weight, mean], state_values_per_parameter=2)
    assert plan.averaging is not None
    assert [sent.nbytes for sent in plan.averaging.sent] == [2000, 40, 8000]
    assert traffic(plan, cluster).sent == ((2000 + 40 + 8000) / 5,) * 2


def test_the_explanation_has_the_bytes_of_each_rank() -> None:
    hierarchical = explain(plan_of(Cluster.imagined(2, 2), use_hierarchical_allreduce=True))
    assert "per update: 3 collectives, 4.000 to 10.000 MB sent by a rank for 4.000 MB of gradients" in hierarchical
    local = explain(plan_of(Cluster.imagined(2, 1), use_local_sgd=True, local_sgd_steps=8))
    assert "in the warm-up, per update: 1 collective, 4.000 MB sent by each rank for 4.000 MB" in local
    assert "after it: 1 collective every 8 updates, 0.500 MB sent by each rank per update" in local


def test_the_explanation_tells_the_warm_up_from_what_follows() -> None:
    gradients = [TensorSpec("a", (MEGABYTE // 2,), "float32"), TensorSpec("b", (MEGABYTE // 4,), "float32")]
    profile = Profile(fuse_all_reduce_ops=False, use_local_sgd=True, local_sgd_steps=4, local_sgd_dtype="bfloat16")
    lines = explain(build_plan(gradients, Cluster.imagined(2, 1), profile)).splitlines()
    assert lines[3].split() == ["0", "1", "2.000", "float32", "0", "allreduce", "a"]
    assert lines[4].split() == ["1", "1", "1.000", "float32", "1", "allreduce", "b"]
    assert lines[6:8] == [
        "in the warm-up, per update: 2 collectives, 3.000 MB sent by each rank for 3.000 MB of gradients",
        "after it: 1 collective every 4 updates, 0.375 MB sent by each rank per update",
    ]
