"""What a plan is made of: buckets, what ranks send by hand and as counted on sockets, and its notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle
import pytest

from fleet_train import fleet, role_maker
from fleet_train.cluster import Cluster
from fleet_train.convert import rehearsal
from fleet_train.convert.rehearsal import Planned
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.plan import CommPlan, TensorSpec, build_plan, explain
from fleet_train.plan.build import fuse
from fleet_train.plan.phases import (
    RECEIVER_BYTES_PER_MESSAGE,
    SENDER_BYTES_PER_MESSAGE,
    Flow,
    flows,
    rounds,
)
from fleet_train.plan.pricing import averaging_bytes, traffic
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import CollectiveSpec
from fleet_train.profile.profile import Buckets

CLUSTER = Cluster.imagined(2, 1)
MEGABYTE = 2**20


def build(*elements: int, cluster: Cluster = CLUSTER, **knobs: object) -> CommPlan:
    gradients = [TensorSpec(f"w{index}", (number,), "float32") for index, number in enumerate(elements)]
    return build_plan(gradients, cluster, Profile(**knobs))  # type: ignore[arg-type]


def notes_of(profile: Profile, ranks_per_node: int = 1, gradients: int = 1) -> dict[str, str]:
    specs = [TensorSpec("w", (8,), "float32")] * gradients
    plan = build_plan(specs, Cluster.imagined(2, ranks_per_node), profile)
    return {note.knob: note.effect for note in plan.notes}


LOCAL = {"use_local_sgd": True, "local_sgd_steps": 8}


@pytest.fixture
def static_mode() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()


def test_first_bucket_keeps_both_bounds() -> None:
    gradients = [TensorSpec(f"w{index}", (MEGABYTE // 8,), "float32") for index in range(4)]  # of half a megabyte each
    for size, edge, sizes in ((4.0, 0.5, [1, 2, 1]), (1.0, 4.0, [2, 2]), (1.0, 1.0, [2, 2])):
        assert [len(bucket) for bucket in fuse(gradients, Buckets(1, size, edge), 100)] == sizes, (size, edge)


@pytest.mark.parametrize(("rule", "sent"), [("keep", []), ("reset", []), ("average", [8000])])
def test_an_averaging_counts_statistics_in_float32_and_an_averaged_state_of_the_optimizer(
    rule: str, sent: list[int]
) -> None:
    weight, mean = TensorSpec("w", (1000,), "float32"), TensorSpec("mean", (10,), "float32")
    profile = Profile(use_local_sgd=True, local_sgd_steps=5, local_sgd_dtype="bfloat16", local_sgd_momentum=rule)
    plan = build_plan([weight], CLUSTER, profile, [weight, mean], state_values_per_parameter=2)
    assert plan.averaging is not None
    assert [one.nbytes for one in plan.averaging.sent] == [2000, 40, *sent]
    assert traffic(plan, CLUSTER).sent == ((2000 + 40 + sum(sent)) / 5,) * 2


def test_local_groups_of_an_asked_size_that_divides_the_ranks() -> None:
    given = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
    assert build(8, cluster=Cluster.imagined(1, 4), **given).group_size == 2
    with pytest.raises(ProfileError, match="inter_nranks=2 does not divide the world size, 5"):
        build(8, cluster=Cluster.imagined(1, 5), **given)


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


def test_the_explanation_tells_the_warm_up_from_what_follows() -> None:
    hierarchical = explain(build(MEGABYTE, cluster=Cluster.imagined(2, 2), use_hierarchical_allreduce=True))
    assert "per update: 3 collectives, 4.000 to 10.000 MB sent by a rank for 4.000 MB of gradients" in hierarchical
    gradients = [TensorSpec("a", (MEGABYTE // 2,), "float32"), TensorSpec("b", (MEGABYTE // 4,), "float32")]
    profile = Profile(fuse_all_reduce_ops=False, use_local_sgd=True, local_sgd_steps=4, local_sgd_dtype="bfloat16")
    lines = explain(build_plan(gradients, Cluster.imagined(2, 1), profile)).splitlines()
    assert lines[3].split() == ["0", "1", "2.000", "float32", "0", "allreduce", "a"]
    assert lines[4].split() == ["1", "1", "1.000", "float32", "1", "allreduce", "b"]
    assert lines[6:8] == [
        "in the warm-up, per update: 2 collectives, 3.000 MB sent by each rank for 3.000 MB of gradients",
        "after it: 1 collective every 4 updates, 0.375 MB sent by each rank per update",
    ]


def socket_bytes(kind: str, size: int, nbytes: int) -> list[float]:
    """Bytes that each rank gives to TCP: payload and Gloo's messages."""
    sent = [0.0] * size
    for (sender, receiver), flow in flows(kind, range(size), nbytes).items():
        sent[sender] += flow.nbytes + SENDER_BYTES_PER_MESSAGE * flow.messages
        sent[receiver] += RECEIVER_BYTES_PER_MESSAGE * flow.messages
    return sent


def test_large_buffers_stay_even_in_an_allreduce_and_are_sent_without_need_in_a_reduce() -> None:
    # 10 segments of at most 1 MB for 4 ranks: 12 of equal length, not 10 of 1 MB. Two ranks' sockets, towards the ring:
    found = flows("allreduce", range(4), 10 * MEGABYTE)
    sockets = [found[edge].nbytes + SENDER_BYTES_PER_MESSAGE * found[edge].messages for edge in ((0, 3), (1, 0))]
    assert sockets == [15730384, 15730352]
    payload = {edge: flow.nbytes / (16 * MEGABYTE) for edge, flow in flows("reduce", [0, 1], 16 * MEGABYTE).items()}
    assert payload == {(0, 1): 0.875, (1, 0): 1.375}
    assert flows("broadcast", [4, 6], 8) == {(4, 6): Flow(8, 1)}, "edges carry the names of the ranks"


def test_rounds_that_pay_the_latency() -> None:
    assert [rounds("allreduce", size) for size in (1, 2, 4)] == [0, 2, 6]
    assert [rounds("reduce", size) for size in (1, 2, 4)] == [0, 2, 4]
    assert [rounds("broadcast", size) for size in (1, 2, 4, 5)] == [0, 1, 2, 3]
    assert [rounds("allgather", size) for size in (1, 2, 4)] == [0, 1, 3]
    # Pairs in turn: three need three rounds, in each of which one has nobody to meet; so do four.
    assert [rounds("alltoall", size) for size in (1, 2, 3, 4, 5, 6)] == [0, 1, 1, 1, 1, 2]


LOCAL_NOTES = dict.fromkeys(("use_local_sgd", "local_sgd_momentum", "local_sgd_dtype", "divergence_check_steps"), "")


def planned(profile: Profile, optimizer: Callable[[], Any]) -> Planned:
    """A network with two batch norms of 12 and 5 channels."""

    def script() -> None:
        fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            hidden = paddle.static.data("x", [None, 4], "float32")
            for channels in (12, 5):
                hidden = paddle.tanh(paddle.nn.BatchNorm1D(channels)(paddle.static.nn.fc(hidden, channels)))
            fleet.distributed_optimizer(optimizer(), profile).minimize(hidden.mean())

    (found,) = rehearsal.plans_of(script, Cluster.imagined(2, 2))
    return found


@pytest.mark.usefixtures("static_mode")
def test_exchanges_of_synchronised_batch_norm_are_in_the_plan() -> None:
    profile = Profile(sync_batch_norm=True, average_over="ranks")
    found = planned(profile, lambda: paddle.optimizer.SGD(0.1))
    assert found.profile == profile
    # Forward: a count, means and squared deviations of each rank. Backward, from the last layer: two sums per channel.
    assert found.plan.statistics == tuple(
        CollectiveSpec(kind, 4 * values, 4, flat=True)
        for kind, values in (("allgather", 25), ("allgather", 11), ("allgather", 10), ("allgather", 24))
    )


@pytest.mark.usefixtures("static_mode")
@pytest.mark.parametrize(("optimizer", "values"), [("SGD", 0), ("AdamW", 2)])
def test_an_averaging_of_the_optimizers_state_is_in_the_plan(optimizer: str, values: int) -> None:
    profile = Profile(use_local_sgd=True, local_sgd_momentum="average")
    averaging = planned(profile, lambda: getattr(paddle.optimizer, optimizer)(0.1)).plan.averaging
    assert averaging is not None
    assert averaging.state_values_per_parameter == values
    assert [statistic.shape for statistic in averaging.statistics] == [(12,), (12,), (5,), (5,)]


def test_headers_are_divided_by_the_period_as_the_payload_is() -> None:
    for dtype, values in (("float32", 1.0), ("bfloat16", 0.5)):
        plan = build(MEGABYTE, use_local_sgd=True, local_sgd_steps=8, local_sgd_dtype=dtype)
        # Of each node: 4 messages of 96 bytes out, 4 answers of 48 bytes.
        found, warm_up = traffic(plan, CLUSTER), traffic(plan, CLUSTER, warm_up=True)
        assert (warm_up.protocol, warm_up.sent) == ((576.0, 576.0), (4.0 * MEGABYTE,) * 2)
        assert found.protocol == (72.0, 72.0)
        assert found.sent == found.leaving == found.entering == (values * MEGABYTE / 2,) * 2
        assert averaging_bytes(plan) == [(values * 4 * MEGABYTE,) * 2]


@pytest.mark.parametrize(
    ("nodes", "hierarchical", "sent", "leaving", "inside"),
    [
        (2, False, (6, 6, 6, 6), (6, 6), (6, 6)),
        (2, True, (10, 4, 10, 4), (4, 4), (10, 10)),
        (1, False, (4, 4), (0,), (8,)),
    ],
)
def test_hierarchical_sends_less_between_nodes_and_more_inside(
    nodes: int, hierarchical: bool, sent: tuple[int, ...], leaving: tuple[int, ...], inside: tuple[int, ...]
) -> None:
    """Of 4 MB, on nodes of two ranks."""
    cluster = Cluster.imagined(nodes, 2)
    found = traffic(build(MEGABYTE, cluster=cluster, use_hierarchical_allreduce=hierarchical), cluster)
    every = (found.sent, found.leaving, found.entering, found.inside)
    assert [tuple(each / MEGABYTE for each in one) for one in every] == [sent, leaving, leaving, inside]
    assert found.most_sent == max(sent) * MEGABYTE
    assert sum(found.sent) == sum(found.leaving) + sum(found.inside)


@pytest.mark.parametrize(
    ("kind", "size", "nbytes", "counted"),
    [
        ("allreduce", 2, 4, [148, 148]),
        ("allreduce", 2, 4 * MEGABYTE, [4194880, 4194880]),
        ("allreduce", 2, 10 * MEGABYTE, [10487200, 10487200]),
        ("allreduce", 3, 4096, [6616, 6608, 6616]),
        ("allreduce", 4, 65536, [100032] * 4),
        ("allreduce", 4, 4 * MEGABYTE, [6293184] * 4),
        ("reduce", 2, 4 * MEGABYTE, [2097488, 4194688]),
        ("reduce", 2, 6 * MEGABYTE, [4194928, 7340704]),
        ("reduce", 3, 4 * MEGABYTE, [2796872, 4194976, 4194976]),
        ("reduce", 4, 4 * MEGABYTE, [3146736, 4195264, 4195264, 4195264]),
        ("broadcast", 3, 4 * MEGABYTE, [8388800, 48, 48]),
        ("broadcast", 4, 4 * MEGABYTE, [8388800, 4194448, 48, 48]),
        ("allgather", 4, 65536, [197472] * 4),
        ("allreduce", 1, 8, [0]),
        ("allreduce", 2, 0, [0, 0]),
    ],
)
def test_backends_send_what_was_counted(kind: str, size: int, nbytes: int, counted: list[int]) -> None:
    """On sockets: Paddle 3.3.1, Gloo, one network namespace per rank."""
    assert socket_bytes(kind, size, nbytes) == counted


@pytest.mark.parametrize(
    ("knobs", "notes"),
    [
        ({"accumulate_steps": 3}, {"accumulate_steps": "once per 3 micro-batches"}),
        ({"compression": "int8"}, {"compression": "go as int8"}),
        ({"amp_level": "O1", "amp_dtype": "float16"}, {"amp_level": "O1 in float16, with a loss scale;"}),
        ({"barrier_every_steps": 5}, {"barrier_every_steps": "a barrier every 5 synchronous steps"}),
        ({"recompute_checkpoints": ["a", "b"]}, {"recompute": "cut at a, b"}),
        (LOCAL, LOCAL_NOTES | {"use_local_sgd": "every 8 steps (constant)"}),
        (
            LOCAL | {"local_sgd_is_warm_steps": 0},
            LOCAL_NOTES | {"divergence_check_steps": "before the first step, then at the first averaging after 100"},
        ),
        (
            LOCAL | {"local_sgd_schedule": "adaptive", "local_sgd_max_steps": 20},
            LOCAL_NOTES | {"use_local_sgd": "every 8 steps (adaptive, at most 20)"},
        ),
        (
            LOCAL | {"outer_optimizer": "slowmo", "outer_lr": 0.5},
            LOCAL_NOTES | {"outer_optimizer": "slowmo: lr 0.5, momentum"},
        ),
    ],
)
def test_what_is_asked_for_has_a_note_and_nothing_else_has(knobs: dict[str, object], notes: dict[str, str]) -> None:
    usual, found = notes_of(Profile()), notes_of(Profile(**knobs))  # type: ignore[arg-type]
    assert {knob for knob in found if found[knob] != usual.get(knob)} == notes.keys()
    for knob, words in notes.items():
        assert words in found[knob]


def test_bounds_of_buckets_and_local_groups_are_explained() -> None:
    fused = {"fuse_grad_size_in_MB", "fuse_parameter_groups_size", "last_comm_group_size_MB"}
    assert fused <= notes_of(Profile(), gradients=3).keys()
    apart = notes_of(Profile(fuse_all_reduce_ops=False, nccl_comm_num=1))
    assert not fused & apart.keys()
    assert apart["fuse_all_reduce_ops"] == "off: one collective for each of 1 gradients"
    for ranks, words in ((4, "local groups of 4 ranks; 2 leaders"), (1, "every local group would have one rank")):
        assert words in notes_of(Profile(use_hierarchical_allreduce=True), ranks)["use_hierarchical_allreduce"]
