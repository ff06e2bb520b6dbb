"""The predicted step: computed by hand for plans on links, its schedule of shared resources, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fleet_train.cluster import Cluster
from fleet_train.plan import CommPlan, TensorSpec, build_plan
from fleet_train.plan.price import (
    Compute,
    Costs,
    Link,
    Network,
    PricedTask,
    TaskPhase,
    finish_times,
    predict,
)
from fleet_train.plan.pricing import Conditions, Pricing, describe, price
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import CollectiveSpec


def task(queue: int, ready: float, *phases: tuple[str, float]) -> PricedTask:
    return PricedTask(queue, tuple(TaskPhase(*phase) for phase in phases), ready)


PAIR = Cluster.imagined(2, 1)
# 1 ms and 100 MB/s between nodes, 0.1 ms and 1 GB/s inside them.
NETWORK = Network(Link(1e-3, 1e8), Link(1e-4, 1e9))
COMPUTE = Compute(0.010, 0.020)
MEGA = 1_000_000


def plan_of(cluster: Cluster, gradients: int = 1, nbytes: int = MEGA, **knobs: object) -> CommPlan:
    knobs = {"fuse_all_reduce_ops": False, "nccl_comm_num": 1, **knobs}
    shapes = [TensorSpec(f"w{index}", (nbytes // 4,), "float32") for index in range(gradients)]
    return build_plan(shapes, cluster, Profile(**knobs))  # type: ignore[arg-type]


def test_last_bucket_is_exposed_whole() -> None:
    found = predict(plan_of(PAIR), PAIR, NETWORK, COMPUTE, batch_size=21)
    # 2 rounds of 1 ms, 1 MB at 100 MB/s.
    assert found.communication == pytest.approx(0.012)
    assert found.exposed == pytest.approx(0.012)
    assert found.step == pytest.approx(0.042)
    assert found.samples_per_second == pytest.approx(1000.0)


def test_each_fragment_hides_behind_steps_of_its_own() -> None:
    local = {"use_local_sgd": True, "local_sgd_steps": 9, "local_sgd_overlap_steps": 2}
    whole = plan_of(PAIR, gradients=3, **local)
    parts = plan_of(PAIR, gradients=3, local_sgd_fragments=3, **local)
    # 32 ms in one piece, or three times 12 ms; two steps of 6 ms hide 12 of each piece.
    slow = Compute(0.002, 0.004)
    assert predict(whole, PAIR, NETWORK, slow).exposed == pytest.approx(0.020 / 9)
    assert predict(parts, PAIR, NETWORK, slow).communication == pytest.approx(0.036 / 9)
    assert predict(parts, PAIR, NETWORK, slow).exposed == pytest.approx(0.0)
    assert predict(parts, PAIR, NETWORK, Compute(0.001, 0.002)).exposed == pytest.approx(3 * 0.006 / 9)


def test_few_bits_are_an_eighth_of_the_bytes_in_one_round() -> None:
    found = predict(plan_of(PAIR, compression="int4"), PAIR, NETWORK, COMPUTE)
    # 1 ms, 489 blocks of 260 bytes at 100 MB/s.
    assert found.communication == pytest.approx(0.001 + 489 * 260 / 1e8)


def test_what_is_exchanged_beside_the_backward_pass_makes_it_longer() -> None:
    plan = plan_of(PAIR, gradients=2)
    # A MB takes 2 ms from computing: the first bucket is exchanged beside the backward pass, the last one behind it.
    found = predict(plan, PAIR, NETWORK, COMPUTE, costs=Costs(taken_seconds_per_byte={"none": 2e-9}))
    # The backward pass ends at 32 instead of 30 ms, the first bucket is ready at 21 and done at 33, the last at 45.
    # What of the first is exchanged behind the end (1 of 12 ms) takes nothing: a little less than 2 ms in all.
    assert found.exposed == pytest.approx(0.015, abs=0.0002)
    only_float32 = Costs(taken_seconds_per_byte={"int8": 2e-9})
    assert predict(plan, PAIR, NETWORK, COMPUTE, costs=only_float32).exposed == pytest.approx(0.014)


def test_communicators_share_the_processors_that_computing_leaves() -> None:
    fast = Network(Link(0.0, 1e15), Link(0.0, 1e15))
    plan = plan_of(PAIR, gradients=2, nccl_comm_num=2)
    # Two buckets are ready at 20.5 and 21 ms, and each is coded for 10 ms: side by side, or one after the other.
    quick, codec = Compute(0.020, 0.001), {"none": 1e-8}
    idle = predict(plan, PAIR, fast, quick, costs=Costs(codec_seconds_per_byte=codec))
    assert idle.exposed == pytest.approx(0.010)
    busy = Costs(codec_seconds_per_byte=codec, taken_seconds_per_byte={"none": 1e-12})
    assert predict(plan, PAIR, fast, quick, costs=busy).exposed == pytest.approx(0.0195, abs=1e-4)


def test_coding_takes_longer_only_beside_computing() -> None:
    fast = Network(Link(0.0, 1e15), Link(0.0, 1e15))
    costs = Costs(codec_seconds_per_byte={"none": 1e-9}, waiting_seconds_per_byte={"none": 4e-9})
    # The only bucket is coded behind the backward pass.
    assert predict(plan_of(PAIR), PAIR, fast, COMPUTE, costs=costs).exposed == pytest.approx(0.001, rel=1e-3)
    # The first of two takes 5 ms from 20 ms on, beside it; the last 1 ms.
    two = predict(plan_of(PAIR, gradients=2), PAIR, fast, COMPUTE, costs=costs)
    assert two.exposed == pytest.approx(0.001, rel=1e-3)
    # Of ten, ready every 2 ms and coded in 5, those that are left at the end take 1 ms each again.
    many = predict(plan_of(PAIR, gradients=10), PAIR, fast, COMPUTE, costs=costs).exposed
    assert 0.004 < many < 0.010


def test_handing_over_is_work_of_the_computing_thread() -> None:
    costs = Costs(bucket_seconds=5e-4, handing_seconds_per_byte={"none": 1e-9})
    # 1.5 ms for each bucket: the last is ready at 33 instead of 30 ms; the first is done by then.
    found = predict(plan_of(PAIR, gradients=2), PAIR, NETWORK, COMPUTE, costs=costs)
    assert found.exposed == pytest.approx(0.0155)
    waits = predict(plan_of(PAIR, gradients=2, sync_nccl_allreduce=True), PAIR, NETWORK, COMPUTE, costs=costs)
    assert waits.exposed == pytest.approx(0.027)


def test_an_averaging_costs_processor_time_where_it_hides() -> None:
    local = {"use_local_sgd": True, "local_sgd_steps": 8}
    costs = Costs(
        codec_seconds_per_byte={"none": 3e-9}, taken_seconds_per_byte={"none": 2e-9}, averaging_seconds_per_byte=1e-9
    )
    waited, hidden = (plan_of(PAIR, **local, local_sgd_overlap_steps=steps) for steps in (0, 2))
    # 12 ms on the link and 3 beside it, waited for; 1 of copies. Behind steps only what is taken, and the copies.
    assert predict(waited, PAIR, NETWORK, COMPUTE, costs=costs).exposed == pytest.approx(0.016 / 8)
    assert predict(hidden, PAIR, NETWORK, COMPUTE, costs=costs).exposed == pytest.approx(0.003 / 8)
    assert predict(hidden, PAIR, NETWORK, COMPUTE, costs=costs).communication == pytest.approx(0.015 / 8)
    in_16_bits = plan_of(PAIR, **local, local_sgd_dtype="bfloat16")
    assert predict(in_16_bits, PAIR, NETWORK, COMPUTE, costs=costs).exposed == pytest.approx((0.007 + 0.001) / 8)


def test_hierarchical_on_two_nodes_of_two_ranks() -> None:
    cluster = Cluster.imagined(2, 2)
    flat = predict(plan_of(cluster), cluster, NETWORK, COMPUTE)
    hierarchical = predict(plan_of(cluster, use_hierarchical_allreduce=True), cluster, NETWORK, COMPUTE)
    # 6 rounds of 1 ms, 1.5 MB at 100 MB/s.
    assert flat.communication == pytest.approx(0.021)
    # Reduce 0.2 + 1 ms, allreduce 2 + 10 ms, broadcast 0.1 + 1 ms.
    assert hierarchical.communication == pytest.approx(0.0143)


def test_an_update_of_merged_micro_batches_computes_each_of_them() -> None:
    assert Compute.of(0.030) == Compute(pytest.approx(0.010), pytest.approx(0.020), 0.0), "unless measured"
    plans = [plan_of(PAIR, accumulate_steps=number) for number in (1, 4)]
    once, merged = (predict(plan, PAIR, NETWORK, COMPUTE, batch_size=8) for plan in plans)
    assert merged.compute == pytest.approx(4 * once.compute)
    assert merged.exposed == pytest.approx(once.exposed)
    assert merged.samples_per_second == pytest.approx(4 * 8 * 2 / merged.step)


def test_statistics_of_batch_norm_hide_behind_nothing() -> None:
    plan = plan_of(PAIR)
    statistics = (CollectiveSpec("allgather", 10**6, 4, flat=True),)
    plain, more = (predict(one, PAIR, NETWORK, COMPUTE) for one in (plan, replace(plan, statistics=statistics)))
    seconds = 10**6 / NETWORK.between.bytes_per_second + NETWORK.between.latency_seconds
    assert more.exposed - plain.exposed == pytest.approx(seconds)


def pricing_of(**knobs: Any) -> Pricing:
    cluster, network = Cluster.imagined(2, 2), Network(Link(1e-4, 125e6), Link(3e-5, 1.25e9))
    plan = build_plan([TensorSpec("w", (2**20,), "float32")], cluster, Profile(**knobs))
    conditions = Conditions(network, Compute.of(0.03), 32, ("--latency_us 100",))
    return price(plan, cluster, conditions)


def test_text_says_traffic_conditions_and_prediction() -> None:
    lines = describe(pricing_of()).splitlines()
    assert lines[0] == "steps between synchronisations: 1"
    assert lines[3:6] == [
        "  sent by a rank: 6.000 MB",
        "  between nodes: 6.000 MB leave a node, and 1728 bytes of Gloo's headers",
        "  inside a node: 6.000 MB",
    ]
    assert lines[7].startswith("between nodes: 100 us, 1000 Mb/s; inside a node: 30 us, 10000 Mb/s; computing: 30 ms")
    assert lines[8] == (
        "predicted step: 80.932 ms = 30.000 computing + 50.932 exposed of 50.932 communication; 1582 samples/s"
    )


def test_what_updates_in_the_next_step_would_hide_is_told_where_it_is_something() -> None:
    conditions = Conditions(NETWORK, COMPUTE)
    plan = plan_of(PAIR, 3)
    found = price(plan, PAIR, conditions)
    # Each bucket takes 12 ms of the link; they are launched at 16.7, 23.3 and 30 ms.
    assert found.prediction.step == pytest.approx(0.0527, abs=1e-4)
    # The second one is postponed: they arrive at 28.7, 54 and 42 ms, when it is needed after 3.3 ms more.
    assert found.in_next_step is not None
    assert found.in_next_step.step == pytest.approx(0.0507, abs=1e-4)
    assert "with overlap_next_step: true: 50.667 ms = 30.000 computing" in describe(found)
    assert predict(replace(plan, overlaps_next_step=True), PAIR, NETWORK, COMPUTE) == found.in_next_step
    overlapped = plan_of(PAIR, 3, overlap_next_step=True)
    for each in (plan_of(PAIR), overlapped, plan_of(PAIR, 3, sync_nccl_allreduce=True)):
        assert price(each, PAIR, conditions).in_next_step is None
    assert price(overlapped, PAIR, conditions).prediction == found.in_next_step


def test_local_sgd_has_a_line_for_its_warm_up() -> None:
    text = describe(pricing_of(use_local_sgd=True, local_sgd_steps=8, local_sgd_is_warm_steps=100))
    assert "steps between synchronisations: 8 (constant; 100 warm-up steps synchronise every step)" in text
    assert "  sent by a rank: 0.750 MB\n" in text
    assert "predicted warm-up step: 80.932 ms" in text
    found = pricing_of(use_local_sgd=True, local_sgd_steps=8, local_sgd_is_warm_steps=0)
    assert (found.warm_up, found.warm_up_traffic, found.to_json()["warm_up_prediction"]) == (None, None, None)
    assert "per warm-up step" not in describe(found)


def test_json_has_everything_and_is_plain() -> None:
    content = json.loads(json.dumps(pricing_of(use_local_sgd=True).to_json()))
    names = "steps_between_synchronisations conditions traffic_per_step prediction warm_up_traffic_per_step "
    assert set(content) == set(f"{names} warm_up_prediction overlap_next_step_prediction".split())
    assert content["traffic_per_step"]["leaving"] == [content["traffic_per_step"]["sent"][0]] * 2
    prediction = content["prediction"]
    assert set(prediction) == {"compute", "communication", "exposed", "step", "samples_per_second"}


@pytest.mark.parametrize(
    ("tasks", "ends"),
    [
        ([task(0, 3.0, ("", 1.0), ("wire", 2.0))], [6.0]),
        ([task(0, 5.0, ("wire", 1.0)), task(0, 0.0, ("wire", 1.0))], [6.0, 7.0]),
        ([task(0, 0.0, ("wire", 2.0)), task(1, 0.0, ("wire", 2.0))], [4.0, 4.0]),
        ([task(0, 0.0, ("wire", 3.0)), task(1, 0.0, ("wire", 1.0))], [4.0, 2.0]),
        ([task(0, 0.0, ("", 1.0), ("wire", 2.0)), task(1, 0.0, ("", 1.0), ("bus", 2.0))], [3.0, 3.0]),
        ([task(0, 0.0, ("wire", 4.0)), task(1, 2.0, ("wire", 1.0))], [5.0, 4.0]),
        ([task(0, 2.0), task(0, 0.0, ("wire", 1.0))], [2.0, 3.0]),
        ([], []),
    ],
    ids=["ready", "queue's order", "two share", "shorter first", "other resources", "late", "no work", "none"],
)
def test_tasks_keep_their_queues_order_and_share_resources(tasks: list[PricedTask], ends: list[float]) -> None:
    assert finish_times(tasks) == pytest.approx(ends)


@pytest.mark.parametrize(
    ("knobs", "exposed"),
    [({}, 0.014), ({"nccl_comm_num": 2}, 0.012), ({"sync_nccl_allreduce": True}, 0.024)],
    ids=["the first hides behind the backward pass", "no wait, but no more bandwidth", "everything is exposed"],
)
def test_two_buckets_hide_what_they_can(knobs: dict[str, Any], exposed: float) -> None:
    """Ready at 20 ms, done at 32; the other is ready at 30, done at 44 of which 30 are computing."""
    found = predict(plan_of(PAIR, gradients=2, **knobs), PAIR, NETWORK, COMPUTE)
    assert found.communication == pytest.approx(0.024)
    assert found.exposed == pytest.approx(exposed)


def test_local_sgd_pays_one_averaging_per_period_and_hides_it_behind_the_steps_of_its_overlap() -> None:
    slow, local = Compute(0.002, 0.004), {"use_local_sgd": True, "local_sgd_steps": 8}
    waited, one_step, many = (plan_of(PAIR, **local, local_sgd_overlap_steps=steps) for steps in (0, 1, 2))
    assert predict(waited, PAIR, NETWORK, COMPUTE).exposed == pytest.approx(0.0015)
    assert predict(waited, PAIR, NETWORK, COMPUTE, warm_up=True).exposed == pytest.approx(0.012)
    # 12 ms in all, of which a step of 6 ms hides as much.
    assert predict(one_step, PAIR, NETWORK, slow).exposed == pytest.approx(0.006 / 8)
    assert predict(one_step, PAIR, NETWORK, slow).communication == pytest.approx(0.012 / 8)
    assert predict(many, PAIR, NETWORK, slow).exposed == 0.0
