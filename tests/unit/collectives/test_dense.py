"""Sums of flat buffers, the methods that buckets are averaged by, and what these remember."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.methods import registry
from fleet_train.collectives.methods.dense import (
    CastAllreduce,
    cast_for,
    cast_on_host,
    cut_for,
    flatten,
    make_allreduces,
    unflatten,
    views,
    without_cast,
)
from fleet_train.plan import Bucket, TensorSpec
from tests.unit.collectives.played import CollectiveSpec, PaperRank, in_turn, ranks_of

pytestmark = pytest.mark.usefixtures("groups_on_paper")
MORE = pytest.mark.parametrize("more", [False, True])


def buffers_of(rank: int) -> list[Any]:
    """4 numbers of float32 and 2 of int64 that tell ranks apart."""
    return [paddle.full([4], 10.0**rank), paddle.to_tensor([rank, 1], dtype="int64")]


def allreduces(world_size: int, *arguments: Any) -> tuple[list[PaperRank], list[Any]]:
    """Each rank's, of the first communicator."""
    ranks = ranks_of(world_size)
    return ranks, [make_allreduces(rank, *arguments)[0] for rank in ranks]  # type: ignore[arg-type]


def sent_as(kind: str, *groups: tuple[int, ...], more: bool, dtype: str = "float32") -> list[CollectiveSpec]:
    return [CollectiveSpec(kind, group, dtype, 4, more) for group in groups]


@MORE
def test_flat_sum_is_one_stage_with_a_collective_for_each_buffer(more: bool) -> None:
    _, every = allreduces(3, 1, 0)
    found, sent = in_turn([one.sum(buffers_of(rank), more) for rank, one in enumerate(every)])
    for floats, integers in found:
        assert (floats.tolist(), integers.tolist()) == ([111.0] * 4, [3, 3])
    assert sent == [
        CollectiveSpec("all_reduce", (0, 1, 2), "float32", 4, more),
        CollectiveSpec("all_reduce", (0, 1, 2), "int64", 2, more),
    ]


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("arguments", [(1, 0), (1, 2), (1, 2, "float16")], ids=["flat", "groups", "groups, float16"])
def test_means_are_divided_before_they_are_added_where_the_backend_does_that(
    arguments: tuple[Any, ...], averages: bool
) -> None:
    """float16 ends at 65504: four times 30000 is infinite on the way, unless it is divided first."""
    ranks = ranks_of(4)
    for rank in ranks:
        rank.engine.averages = averages
    every = [make_allreduces(rank, *arguments)[0] for rank in ranks]  # type: ignore[arg-type]
    found, sent = in_turn([one.sum([paddle.full([4], 30000.0)], divide_by=4) for one in every])
    is_in_range = averages or len(arguments) == 2
    assert [total.tolist() for (total,) in found] == [[30000.0 if is_in_range else float("inf")] * 4] * 4
    assert len(sent) == (1 if arguments == (1, 0) else 5)


@pytest.mark.parametrize("averages", [False, True])
def test_a_bucket_on_the_wire_in_16_bits_keeps_its_range_where_the_backend_averages(averages: bool) -> None:
    ranks = ranks_of(4)
    for rank in ranks:
        rank.engine.averages = averages
    every = [CastAllreduce(make_allreduces(rank, 1, 0)[0], "float16", cast_for(False)) for rank in ranks]  # type: ignore[arg-type]
    found, _ = in_turn([one.sum([paddle.full([4], 30000.0)], divide_by=4) for one in every])
    assert [total.tolist() for (total,) in found] == [[30000.0 if averages else float("inf")] * 4] * 4


@MORE
def test_local_groups_reduce_to_their_leaders_who_sum_and_hand_down(more: bool) -> None:
    """Five ranks in pairs: the last local group is one rank, that has nobody to reduce from."""
    ranks, every = allreduces(5, 1, 2)
    assert all(rank.formed == ranks[0].formed for rank in ranks)
    assert [group.ranks for group in ranks[0].formed] == [(0, 1), (2, 3), (0, 2, 4)]
    found, sent = in_turn([one.sum(buffers_of(rank)[:1], more) for rank, one in enumerate(every)])
    assert [total.tolist() for (total,) in found] == [[11111.0] * 4] * 5
    assert sent == [
        *sent_as("reduce", (0, 1), (2, 3), more=True),
        *sent_as("all_reduce", (0, 2, 4), more=True),
        *sent_as("broadcast", (0, 1), (2, 3), more=more),
    ]
    assert [one.leaders_group.ranks for one in every] == [(0, 2, 4)] * 5


def test_leaders_send_in_16_bits_what_local_groups_sum_in_32() -> None:
    """1 + 1/256 has nine bits: a local group's sum of two keeps it, and bfloat16 between the leaders does not."""
    ranks, every = allreduces(4, 1, 2, "bfloat16")
    fine = paddle.full([4], 1 + 2.0**-8)
    found, sent = in_turn([one.sum([fine.clone()]) for one in every])
    assert [total.tolist() for (total,) in found] == [[4.0] * 4] * 4
    assert {total.dtype for (total,) in found} == {paddle.float32}
    assert [(one.kind, one.dtype) for one in sent if one.dtype != "float32"] == [("all_reduce", "bfloat16")]
    assert all(len(rank.formed) == 3 for rank in ranks)
    assert [one.leaders_group.ranks for one in every] == [(0, 2)] * 4

    exact, sent = in_turn([without_cast(one).sum([fine.clone()]) for one in every])
    assert [total.tolist() for (total,) in exact] == [[4 + 2.0**-6] * 4] * 4
    assert {one.dtype for one in sent} == {"float32"}


SPECIAL = [0x7FC00000, 0x7F800001, 0xFFC00000, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]  # not a number
SPECIAL += [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000000, 0x80000000, 0x00000001, 0x80008000]
SPECIAL += [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF808000, 0x007FFFFF]  # ties, and beside them


def bits_of(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.numpy().view(np.uint16 if tensor.dtype == paddle.bfloat16 else np.uint32)


@pytest.mark.parametrize("elements", [1, 1 << 16, 200_001])
@pytest.mark.parametrize("seed", range(3))
def test_casts_have_the_bits_of_paddles(seed: int, elements: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, elements + len(SPECIAL), np.uint32)
    bits[-len(SPECIAL) :] = SPECIAL
    wide = paddle.to_tensor(bits.view(np.float32))
    narrow = cast_on_host(wide, "bfloat16")
    assert narrow.dtype == paddle.bfloat16
    np.testing.assert_array_equal(bits_of(narrow), bits_of(wide.cast("bfloat16")))
    back = cast_on_host(narrow, "float32")
    np.testing.assert_array_equal(bits_of(back), bits_of(narrow.cast("float32")))
    np.testing.assert_array_equal(bits_of(wide), bits)
    columns = paddle.arange(6, dtype="float32").reshape([2, 3]).t()  # not contiguous
    assert cast_on_host(columns, "bfloat16").cast("float32").tolist() == [[0, 3], [1, 4], [2, 5]]


def test_buffers_are_cut_without_a_copy_on_a_host_only() -> None:
    assert (cut_for(True), cut_for(False)) == (views, unflatten)
    for cut in (views, unflatten):
        for shapes in ([(2, 3), (), (4,)], [(11,)], [(1, 11)]):
            parts = cut(paddle.arange(11, dtype="float32"), shapes)
            assert [tuple(part.shape) for part in parts] == shapes
            assert [value for part in parts for value in part.reshape([-1]).tolist()] == list(range(11))
    whole = paddle.arange(12, dtype="float32")
    parts = views(whole[4:], [[2, 3], [2]])
    assert [part.tolist() for part in parts] == [[[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], [10.0, 11.0]]
    copied = flatten(parts[1:])
    whole.scale_(2.0)
    assert (parts[1].tolist(), copied.tolist()) == ([20.0, 22.0], [10.0, 11.0])
    np.testing.assert_array_equal(flatten(parts).numpy(), whole[4:].numpy())


class Remembering:
    """A method that keeps the state that it is told to take back."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.taken: dict[str, Any] = {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.taken = {name: tensor.tolist() for name, tensor in state.items()}


def bucket(*names: str) -> Bucket:
    return Bucket(0, tuple(TensorSpec(name, (1,), "float32") for name in names), 0)


def test_each_method_gets_the_state_of_its_parameters_and_kind() -> None:
    """Also where buckets are cut in another way, parameters' names contain dots, and one name begins another."""
    arrays = {
        name: np.full(1, float(index))
        for index, name in enumerate(
            [
                "int8/step",
                "int8/a.error",
                "int8/a.b.error",
                "int8/c.error",
                "powersgd/a.error",
                "int8/gone.error",
                "other",
            ]
        )
    }
    first, second, third = Remembering("int8"), Remembering("int8"), Remembering("powersgd")
    every: Any = [(bucket("a", "c"), first), (bucket("a.b"), second), (bucket("a"), third)]
    unknown = registry.write_state(every, arrays, paddle.CPUPlace())
    assert first.taken == {"step": [0.0], "a.error": [1.0], "c.error": [3.0]}
    assert second.taken == {"step": [0.0], "a.b.error": [2.0]}
    assert third.taken == {"a.error": [4.0]}
    assert unknown == ["int8/gone.error", "other"]
