"""Which method carries out which compression, with which settings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.methods import dense as allreduce
from fleet_train.collectives.methods import quantised
from fleet_train.collectives.methods.dense import BucketMethod, DenseMethod, make_allreduces
from fleet_train.collectives.methods.dgc import DgcMethod
from fleet_train.collectives.methods.powersgd import PowerSgdMethod
from fleet_train.collectives.methods.quantised import QuantisedMethod, QuantisedSums
from fleet_train.collectives.methods.registry import Parts
from fleet_train.errors import ConversionError
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.profile import Profile
from fleet_train.profile.methods import compression_of
from fleet_train.profile.methods.dgc import DgcSettings
from tests.unit.collectives.in_turn import CollectiveSpec, form, in_turn, ranks_of

GRADIENTS = [TensorSpec("w", (20, 30), "float32")]


@pytest.fixture(autouse=True)
def groups_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (allreduce, quantised):
        monkeypatch.setattr(module, "new_group", form)


def methods(compression: str, world_size: int = 2, **settings: Any) -> list[BucketMethod]:
    """Of the one bucket on each rank; on the second of two communicators."""
    profile = Profile(compression=compression, nccl_comm_num=2, **settings)
    plan = build_plan(GRADIENTS, Cluster.imagined(world_size, 1), profile)
    bucket = replace(plan.buckets[0], communicator=1)
    found = []
    for rank in ranks_of(world_size):
        job: Any = rank
        job.engine.device = type("Device", (), {"to_device": staticmethod(paddle.to_tensor)})()
        allreduces = make_allreduces(job, 2, plan.group_size, compression_of(compression).wire_dtype or "float32")
        sums = QuantisedSums(job, plan, allreduces) if bucket.is_quantised else None
        dgc = DgcSettings(momentum=0.0, sparsity=(0.9,), min_elements=0) if compression == "dgc" else None
        found.append(Parts(bucket, job, plan, profile, allreduces[1], dgc, sums).make())
    return found


def sent_by(every: list[BucketMethod]) -> list[tuple[str, str, int]]:
    local = [[paddle.full([20, 30], value + 1.0)] for value in range(len(every))]
    found, sent = in_turn([one.average(mine) for one, mine in zip(every, local, strict=True)])
    for (average,) in found:
        assert (average.shape, str(average.dtype)) == ([20, 30], "paddle.float32")
    return [(one.kind, one.dtype, one.elements) for one in sent if isinstance(one, CollectiveSpec)]


@pytest.mark.parametrize(
    ("compression", "method", "sent"),
    [
        ("none", DenseMethod, [("all_reduce", "float32", 600)]),
        ("bf16", DenseMethod, [("all_reduce", "bfloat16", 600)]),
        ("fp16", DenseMethod, [("all_reduce", "float16", 600)]),
        ("int8", QuantisedMethod, [("all_gather", "uint8", 2 * (512 + 4))]),
        ("int4", QuantisedMethod, [("all_gather", "uint8", 2 * (256 + 4))]),
        ("powersgd", PowerSgdMethod, [("all_reduce", "float32", 20), ("all_reduce", "float32", 30)]),
        ("dgc", DgcMethod, [("all_gather", "int32", 120)]),
    ],
)
def test_each_compression_sends_what_it_is_called_for(
    compression: str, method: type, sent: list[tuple[str, str, int]]
) -> None:
    every = methods(compression)
    assert [type(one) for one in every] == [method] * 2
    assert sent_by(every) == sent


@pytest.mark.parametrize(("compression", "dtype"), [("none", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_only_leaders_of_local_groups_send_in_16_bits(compression: str, dtype: str) -> None:
    every = methods(compression, use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=1)
    assert sent_by(every) == [("all_reduce", dtype, 600)]


@pytest.mark.parametrize(("compression", "dtype"), [("none", "float32"), ("bf16", "bfloat16")])
def test_local_groups_themselves_send_gradients_as_they_are(compression: str, dtype: str) -> None:
    every = methods(compression, world_size=4, use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2)
    assert sent_by(every) == [
        *[("reduce", "float32", 600)] * 2,
        ("all_reduce", dtype, 600),
        *[("broadcast", "float32", 600)] * 2,
    ]


@pytest.mark.parametrize("compression", ["int8", "powersgd", "dgc"])
def test_other_compressions_have_no_dtype_of_their_own_between_local_groups(compression: str) -> None:
    assert not compression_of(compression).wire_dtype


@pytest.mark.parametrize(
    ("compression", "told"),
    [("int8", "int8 was planned without links for quantised sums"), ("dgc", "an optimizer whose momentum it has not")],
)
def test_compression_without_what_it_needs_is_refused(compression: str, told: str) -> None:
    profile = Profile(compression=compression)
    plan = build_plan(GRADIENTS, Cluster.imagined(2, 1), profile)
    job: Any = ranks_of(2)[0]
    (allreduce,) = make_allreduces(job, 1, 0)
    with pytest.raises(ConversionError, match=told):
        Parts(plan.buckets[0], job, plan, profile, allreduce).make()
