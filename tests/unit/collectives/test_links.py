"""Which rank's bytes reach which in a quantised sum: over one group, and over pairs."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import paddle
import pytest

from fleet_train.collectives.engine import Stages
from fleet_train.collectives.methods import quantised
from fleet_train.collectives.methods.quantised import AllToAll, make_all_to_all
from tests.unit.collectives.in_turn import form, in_turn, ranks_of
from tests.unit.collectives.recorded import Group

BACKENDS = pytest.mark.parametrize("backend", ["nccl", "gloo"])
MANY = [[0, 1], [1, 3], [0, 1, 2], [0, 2, 3], [1, 2, 3, 5], [0, 1, 2, 3, 4]]
MEMBERS = pytest.mark.parametrize("members", MANY)
WORLD = 6


def linked(monkeypatch: pytest.MonkeyPatch, backend: str, members: list[int]) -> list[Any]:
    """The links of all ranks of the world."""
    monkeypatch.setattr(quantised, "new_group", form)
    monkeypatch.setattr(quantised, "backend_name", lambda: backend)
    ranks = ranks_of(WORLD)
    links = [make_all_to_all(rank, form(rank, members), members) for rank in ranks]  # type: ignore[arg-type]
    assert all(rank.formed == ranks[0].formed for rank in ranks)
    pairs = list(combinations(members, 2)) if backend == "gloo" and len(members) > 2 else []
    assert [group.ranks for group in ranks[0].formed[1:]] == pairs
    return links


def wire(sender: int, receiver: int) -> Any:
    return paddle.to_tensor([sender, receiver, 7], dtype="uint8")


def idle(stages: int) -> Stages[None]:
    """A rank that has no part in an exchange: it is not asked to take part by those who use links."""
    yield from (quantised.Stage(more=True) for _ in range(stages))


@BACKENDS
@MEMBERS
def test_each_member_gets_all_wires_in_the_order_of_members(
    monkeypatch: pytest.MonkeyPatch, backend: str, members: list[int]
) -> None:
    links = linked(monkeypatch, backend, members)
    assert [links[rank].members for rank in members] == [len(members)] * len(members)
    assert [links[rank].position for rank in range(WORLD) if rank not in members] == [-1] * (WORLD - len(members))
    ranks = [links[rank].gather(wire(rank, 9), True) if rank in members else idle(1) for rank in range(WORLD)]
    found, sent = in_turn(ranks)
    for rank in members:
        assert [one.tolist() for one in found[rank]] == [[member, 9, 7] for member in members]
    assert [(one.kind, one.more) for one in sent] == [("all_gather", True)]


# Two members send each other everything: they gather, and have no pairs.
@pytest.mark.parametrize(
    ("backend", "members"),
    [(backend, members) for backend in ("nccl", "gloo") for members in MANY if backend == "nccl" or len(members) > 2],
)
def test_each_member_gets_what_the_others_sent_to_it_in_their_order(
    monkeypatch: pytest.MonkeyPatch, backend: str, members: list[int]
) -> None:
    links = linked(monkeypatch, backend, members)
    stages = 1 if backend == "nccl" else len(members) - 1 + len(members) % 2
    ranks = [
        links[rank].exchange([wire(rank, other) for other in members]) if rank in members else idle(stages)
        for rank in range(WORLD)
    ]
    found, _ = in_turn(ranks)
    for rank in members:
        assert [one.tolist() for one in found[rank]] == [[other, rank, 7] for other in members if other != rank]


def test_gathering_ends_where_nothing_follows() -> None:
    links = [AllToAll(Group(0), [0, 1], rank) for rank in range(2)]
    _, sent = in_turn([one.gather(wire(0, 0)) for one in links])
    assert [one.more for one in sent] == [False]
    pairs = AllToAll(Group(0), [4, 2], 2, {})
    assert (pairs.members, pairs.position) == (2, 1)
