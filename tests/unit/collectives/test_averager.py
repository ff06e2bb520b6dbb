"""LocalSGD's averaging on three ranks in one process, against hand-computed numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives import fragments as flats_module
from fleet_train.collectives.averaging import HeldValues, ParameterAverager
from fleet_train.collectives.engine import HostDevice
from fleet_train.collectives.methods.dense import make_allreduces
from fleet_train.collectives.methods.quantised import QuantisedSums
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.profile import Profile
from tests.unit.collectives.played import CollectiveSpec, PaperRank, in_turn, ranks_of

pytestmark = pytest.mark.usefixtures("groups_on_paper")
RANKS = 3
SHAPES = {"one.w": (2, 3), "one.b": (3,), "two.w": (4,), "three.w": (2, 2), "three.b": (2,)}


def averager(rank: PaperRank, rate: float = 0.5, dtype: str = "float32", **settings: Any) -> ParameterAverager:
    profile = Profile(use_local_sgd=True, **settings)
    values = [TensorSpec(name, shape, dtype) for name, shape in SHAPES.items()]
    plan = build_plan(values, Cluster.imagined(RANKS, 1), profile, values)
    (allreduce,) = make_allreduces(rank, 1, 0)  # type: ignore[arg-type]
    assert plan.averaging is not None
    sums = QuantisedSums(rank, plan, [allreduce]) if plan.averaging.quantised else None  # type: ignore[arg-type]
    return ParameterAverager(profile, plan, allreduce, sums, lambda: rate, HostDevice().to_host)


def averagers(**settings: Any) -> list[ParameterAverager]:
    return [averager(rank, **settings) for rank in ranks_of(RANKS)]


def full(value: float, dtype: str = "float32") -> list[Any]:
    """All parameters, each of one value: that, twice that, .."""
    return [paddle.full(shape, value * (index + 1), dtype) for index, shape in enumerate(SHAPES.values())]


def held(value: float, dtype: str = "float32") -> HeldValues:
    return HeldValues(full(value, dtype), [paddle.full([2], 100 * value), paddle.full([1], value, "float64")], [])


def average(
    every: Sequence[ParameterAverager], brought: Sequence[HeldValues], fragment: int = 0
) -> list[CollectiveSpec]:
    loss = paddle.full([1], float("nan"))  # nobody may use it where the period is constant
    stages = [
        one.average(one.fragments[fragment], one.held_of(one.fragments[fragment], mine), loss)
        for one, mine in zip(every, brought, strict=True)
    ]
    return in_turn(stages)[1]


def values_of(tensors: Sequence[Any]) -> list[float]:
    """Of tensors that hold one value each."""
    found = []
    for tensor in tensors:
        (value,) = set(tensor.cast("float64").numpy().reshape(-1).tolist())
        found.append(value)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_parameters_and_statistics_become_their_means(dtype: str) -> None:
    every, brought = averagers(dtype=dtype), [held(value, dtype) for value in (1.0, 2.0, 6.0)]
    every[0].before_update(full(1.0, dtype))
    sent = average(every, brought)
    for mine in brought:
        assert values_of(mine.parameters) == [3.0, 6.0, 9.0, 12.0, 15.0]
        assert {str(tensor.dtype) for tensor in mine.parameters} == {f"paddle.{dtype}"}
        assert values_of(mine.statistics) == [300.0, 3.0]
    wide = "float64" if dtype == "float64" else "float32"
    assert [(one.dtype, one.elements, one.more) for one in sent] == [
        (wide, 19, False),
        ("float32", 2, False),
        ("float64", 1, False),
    ]
    every[0].after_synchronous_step(0, held(1.0, dtype))
    every[0].drain_copies()
    assert (every[0].keeps_anchor, every[0].anchor, every[0].velocity) == (False, None, None)


def test_16_bits_carry_the_difference_to_what_was_last_agreed() -> None:
    """Of 1000 and a little, bfloat16 would keep nothing. 259 / 3 has more bits than it has: the mean is taken in 32."""
    for littles, mean in (((3.0, 5.0, 1.0), 3.0), ((128.0, 64.0, 64.0), 256 / 3)):
        every = averagers(local_sgd_dtype="bfloat16")
        brought = [
            HeldValues([one + little for one in full(1000.0)], [paddle.full([2], little)], []) for little in littles
        ]
        for one in every:
            one.before_update(full(1000.0))
            one.before_update(full(7.0))  # it is the first that counts
        sent = average(every, brought)
        assert [(one.dtype, one.elements) for one in sent] == [("bfloat16", 19), ("float32", 2)]
        expected = flat([tensor + mean for tensor in full(1000.0)])
        for one, mine in zip(every, brought, strict=True):
            np.testing.assert_allclose(flat(mine.parameters), expected, rtol=1e-7)
            np.testing.assert_allclose(flat(mine.statistics), [mean] * 2, rtol=1e-6)
            (anchor,) = one.anchor or []
            np.testing.assert_allclose(anchor.tolist(), expected, rtol=1e-7)


def test_values_are_added_in_the_dtype_of_their_means_and_keep_their_own() -> None:
    tensors = [paddle.full([2], 1.0, "float16"), paddle.full([3], 2.0, "float64"), paddle.full([1], 3.0, "bfloat16")]
    more = [paddle.full([2], 0.5), paddle.full([3], 2.0**-40, "float64"), paddle.full([1], 4.0)]
    flats_module.add(tensors, flats_module.flats(more))
    assert values_of(tensors) == [1.5, 2.0 + 2.0**-40, 7.0]
    assert [str(one.dtype) for one in tensors] == ["paddle.float16", "paddle.float64", "paddle.bfloat16"]


FRAGMENTS = {"local_sgd_fragments": 2, "local_sgd_steps": 4, "local_sgd_fragment_pattern": "strided"}
# Layers are dealt out in turn: "one" and "three" to the first, "two" to the second.
FIRST, SECOND = (0, 1, 3, 4), (2,)


def flat(tensors: Sequence[Any]) -> list[float]:
    return [value for tensor in tensors for value in tensor.reshape([-1]).tolist()]


def test_anchor_and_momentum_of_fragments_are_saved_as_those_of_all_parameters() -> None:
    """DiLoCo at a momentum of 1/2 and a rate of 1: a fragment with a mean difference d goes on by 1.5 d."""
    settings = {**FRAGMENTS, "outer_optimizer": "diloco", "outer_lr": 1.0, "outer_momentum": 0.5}
    every = averagers(**settings)
    brought = [HeldValues(full(value), [], []) for value in (1.0, 2.0, 6.0)]
    for one in every:
        one.before_update(full(5.0))
    average(every, brought, fragment=0)
    (one, *_) = every
    # Differences to 5, 10, .. : 4 - 1 + 3 over three ranks = 2 (times 1, 2, 4, 5 by parameter).
    agreed = [paddle.full(shape, [2.0, 4.0, 15.0, 8.0, 10.0][i]) for i, shape in enumerate(SHAPES.values())]
    momentum = [paddle.full(shape, [2.0, 4.0, 0.0, 8.0, 10.0][i]) for i, shape in enumerate(SHAPES.values())]
    assert one.anchor is not None
    assert one.velocity is not None
    assert one.anchor[0].tolist() == flat(agreed)
    assert one.velocity[0].tolist() == flat(momentum)
    (again, *_) = averagers(**settings)
    assert (again.anchor, again.velocity) == (None, None)
    again.restore(one.anchor, one.velocity)
    assert again.anchor is not None
    assert again.velocity is not None
    assert again.anchor[0].tolist() == flat(agreed)
    assert again.velocity[0].tolist() == flat(momentum)
    assert again.fragments[1].anchor[0].tolist() == [15.0] * 4  # type: ignore[index]
    again.restore(None, None)
    assert (again.anchor, again.velocity) == (None, None)
    again.restore(one.anchor, None)
    assert again.velocity is None


@pytest.mark.parametrize(
    ("has_statistics", "has_state", "following"),
    [(True, False, [False]), (True, True, [True, False]), (False, True, [False]), (False, False, [])],
)
def test_few_bits_carry_whole_numbers_exactly_whatever_follows(
    has_statistics: bool, has_state: bool, following: list[bool]
) -> None:
    """Differences to the agreed ones, -127 .. 127 in steps of the scale, lose nothing."""
    momentum = "average" if has_state else "keep"
    every = averagers(local_sgd_dtype="int8", quantised_block_size=32, local_sgd_momentum=momentum)
    brought = []
    for one, little in zip(every, (3.0, 5.0, 1.0), strict=True):
        one.before_update(full(1000.0))
        statistics = [paddle.full([2], little)] if has_statistics else []
        state = [paddle.full([1], little)] if has_state else []
        brought.append(HeldValues([each + little for each in full(1000.0)], statistics, state))
    sent = average(every, brought)
    for mine in brought:
        np.testing.assert_allclose(flat(mine.parameters), flat([each + 3.0 for each in full(1000.0)]), rtol=1e-6)
        assert values_of([*mine.statistics, *mine.accumulators]) == [3.0] * len(following)
    in_bits = [one.more for one in sent if one.dtype == "uint8"]
    assert in_bits == [True] * (len(in_bits) - 1) + [bool(following)]
    assert [one.more for one in sent if one.dtype == "float32"] == following
    for one in every:
        ((bucket, memory),) = one.memories
        assert [gradient.name for gradient in bucket.gradients] == list(SHAPES)
        assert (memory.kind, bucket.index) == ("local_sgd", 0)
        assert memory.state()["one.w.sums"].tolist() == [1]
