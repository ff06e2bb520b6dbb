"""Sums of flat buffers over all ranks: flat, over local groups, and with another dtype on the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.methods import dense
from fleet_train.collectives.methods.dense import CastAllreduce, FlatAllreduce, cast_for, make_allreduces, without_cast
from tests.unit.collectives.in_turn import CollectiveSpec, PaperRank, form, in_turn, ranks_of
from tests.unit.collectives.recorded import Group

PAIRS_OF_FIVE = [(0, 1), (2, 3), (4,)]
MORE = pytest.mark.parametrize("more", [False, True])


@pytest.fixture(autouse=True)
def groups_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "new_group", form)


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


def test_one_local_group_has_no_leaders_to_sum_between() -> None:
    ranks, every = allreduces(3, 1, 4)
    assert [group.ranks for group in ranks[0].formed] == [(0, 1, 2)]
    found, sent = in_turn([one.sum(buffers_of(rank)[:1]) for rank, one in enumerate(every)])
    assert [total.tolist() for (total,) in found] == [[111.0] * 4] * 3
    assert [one.kind for one in sent] == ["reduce", "broadcast"]
    assert [one.leaders_group for one in every] == [None] * 3


def test_each_communicator_has_local_groups_of_its_own() -> None:
    for group_size, groups in ((0, 3), (2, 9)):
        (rank,) = ranks_of(5)[:1]
        made = make_allreduces(rank, 3, group_size)  # type: ignore[arg-type]
        assert (len(made), len(rank.formed)) == (3, groups)


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


def test_what_is_flat_has_no_cast_to_leave_out() -> None:
    flat = FlatAllreduce(Group(0))
    assert without_cast(flat) is flat


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("wire", "expected"), [("bfloat16", 2.0), ("float16", 2 + 2.0**-8)])
def test_a_sum_in_16_bits_has_the_buffers_dtype(wire: str, expected: float, on_host: bool) -> None:
    """Each brings 1 + 2**-9, which bfloat16 rounds to 1 and float16 holds."""
    every = [CastAllreduce(FlatAllreduce(Group(0)), wire, cast_for(on_host)) for _ in range(2)]
    found, sent = in_turn([one.sum([paddle.full([3], 1 + 2.0**-9)], more=True) for one in every])
    for (total,) in found:
        assert total.dtype == paddle.float32
        np.testing.assert_array_equal(total.numpy(), np.full(3, expected, "float32"))
    assert sent == [CollectiveSpec("all_reduce", (0, 1), wire, 3, more=True)]
