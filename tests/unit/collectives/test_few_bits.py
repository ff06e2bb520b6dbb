"""Quantised sums of several ranks: whose bytes reach whom, and results and errors of a simulation in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.engine import Stages
from fleet_train.collectives.methods import quantised
from fleet_train.collectives.methods.dense import make_allreduces
from fleet_train.collectives.methods.quantised import (
    QuantisedAllreduce,
    QuantisedMethod,
    QuantisedSums,
    make_all_to_all,
)
from fleet_train.plan import Bucket, TensorSpec, build_plan
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import QuantisedSettings
from tests.unit.collectives.played import CollectiveSpec, PaperRank, form, in_turn, ranks_of

ELEMENTS, BLOCK = 150, 32
WORLDS = pytest.mark.parametrize("world_size", [2, 3, 4])
SHAPES = [(3, 7), (40,), (1,), (8, 11)]
GRADIENTS = [TensorSpec(f"w{index}", shape, "float32") for index, shape in enumerate(SHAPES)]


pytestmark = pytest.mark.usefixtures("groups_on_paper")


@pytest.fixture(autouse=True, params=["nccl", "gloo"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(quantised, "backend_name", lambda: request.param)
    return str(request.param)


def settings(bits: int = 8, **others: Any) -> QuantisedSettings:
    return QuantisedSettings(bits, BLOCK, **others)


def sums_of(rank: PaperRank, **profile: Any) -> QuantisedSums:
    chosen = Profile(compression="int8", **profile)
    plan = build_plan(GRADIENTS, Cluster.imagined(rank.world_size, 1), chosen)
    made = make_allreduces(rank, plan.communicators, plan.group_size)  # type: ignore[arg-type]
    return QuantisedSums(rank, plan, made)  # type: ignore[arg-type]


def allreduces(world_size: int, chosen: QuantisedSettings, name: str = "w0") -> list[QuantisedAllreduce]:
    return [sums_of(rank).make(0, name, ELEMENTS, chosen).rounded for rank in ranks_of(world_size)]


def values(world_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((world_size, ELEMENTS)).astype("float32")


def summed(every: Sequence[Any], brought: np.ndarray) -> list[np.ndarray]:
    tensors = [paddle.to_tensor(mine) for mine in brought]
    found, _ = in_turn([one.sum([mine]) for one, mine in zip(every, tensors, strict=True)])
    for tensor, mine in zip(tensors, brought, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), mine)
    return [np.array(total.numpy()) for (total,) in found]


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """What is read of values [elements] whose blocks are sent as whole numbers of their scale."""
    levels = {8: 127, 4: 7}[bits]
    blocks = values.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / levels
    whole = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0))
    return (whole * scales).reshape(-1)


class Simulated:
    """What ranks owe and read, in float64: two read each other's numbers; more round the sums of a part each."""

    def __init__(self, world_size: int, bits: int, feedback: bool = True) -> None:
        self.bits, self.feedback, self.world_size = bits, feedback, world_size
        self.parts = world_size if world_size > 2 else 1
        blocks = -(-ELEMENTS // (BLOCK * self.parts))
        self.size = blocks * BLOCK
        self.owed = np.zeros((world_size, self.parts * self.size))

    def sum(self, brought: np.ndarray) -> np.ndarray:
        self.owed[:, :ELEMENTS] += brought
        read = np.stack([rounded(mine, self.bits) for mine in self.owed])
        left = self.owed - read
        if self.parts == 1:
            total = read.sum(axis=0)
        else:
            total = np.empty(self.parts * self.size)
            for owner in range(self.parts):
                own = slice(owner * self.size, (owner + 1) * self.size)
                exact = self.owed[owner, own] + read[:, own].sum(axis=0) - read[owner, own]
                total[own] = rounded(exact, self.bits)
                left[owner, own] = exact - total[own]
        self.owed = left if self.feedback else np.zeros_like(left)
        return total[:ELEMENTS]


@WORLDS
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("feedback", [True, False])
def test_sums_and_what_is_kept_back_are_those_of_the_simulation(world_size: int, bits: int, feedback: bool) -> None:
    every = allreduces(world_size, settings(bits, error_feedback=feedback))
    simulated = Simulated(world_size, bits, feedback)
    for step in range(3):
        brought = values(world_size, step)
        found, expected = summed(every, brought), simulated.sum(brought)
        for rank, total in enumerate(found):
            np.testing.assert_array_equal(total, found[0])
            np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
            assert (every[rank].step, every[rank].has_error_feedback) == (step + 1, feedback)
            owed = every[rank].residual.numpy()
            np.testing.assert_allclose(owed, simulated.owed[rank, :ELEMENTS], rtol=1e-4, atol=1e-5)


def test_two_send_everything_once_and_three_their_parts_and_then_the_sums(backend: str) -> None:
    """150 elements: 5 blocks of 36 bytes between two; 2 blocks for each of three owners."""
    for more in (True, False):
        two, three = (allreduces(world_size, settings()) for world_size in (2, 3))
        _, sent = in_turn([one.sum([paddle.ones([ELEMENTS])], more) for one in two])
        assert sent == [CollectiveSpec("all_gather", (0, 1), "uint8", 180, more)]
        _, sent = in_turn([one.sum([paddle.ones([ELEMENTS])], more) for one in three])
        there = [CollectiveSpec("all_to_all", (0, 1, 2), "uint8", 216, True)]
        if backend == "gloo":
            both_ways = [pair for pair in ((0, 1), (0, 2), (1, 2)) for _ in range(2)]
            there = [CollectiveSpec("broadcast", pair, "uint8", 72, True) for pair in both_ways]
        assert sorted(sent[:-1], key=lambda one: one.ranks) == there
        assert sent[-1] == CollectiveSpec("all_gather", (0, 1, 2), "uint8", 72, more)


def gradients(world_size: int, seed: int = 0) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    return [[random.standard_normal(shape).astype("float32") for shape in SHAPES] for _ in range(world_size)]


def methods(ranks: Sequence[PaperRank], feedback: bool = True, **profile: Any) -> list[QuantisedMethod]:
    bucket, chosen = Bucket(0, tuple(GRADIENTS), 0), settings(error_feedback=feedback)
    return [
        QuantisedMethod(bucket, sums_of(rank, **profile).make(0, "w0", ELEMENTS, chosen), len(ranks)) for rank in ranks
    ]


def averaged(every: Sequence[QuantisedMethod], brought: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    tensors = [[paddle.to_tensor(one) for one in mine] for mine in brought]
    found, _ = in_turn([one.average(mine) for one, mine in zip(every, tensors, strict=True)])
    for mine, before in zip(tensors, brought, strict=True):
        for tensor, one in zip(mine, before, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), one)
    return [[np.array(average.numpy()) for average in averages] for averages in found]


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


@pytest.mark.parametrize("leaders", [2, 3, 5])
def test_local_groups_sum_exactly_and_their_leaders_in_few_bits(leaders: int) -> None:
    """Local groups of two: what the leaders bring to the few bits are the sums of their local groups. The others yield
    as many stages as they: from three leaders on, these exchange parts before they gather the sums."""
    every = methods(ranks_of(2 * leaders), use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2)
    brought = np.stack([flat(mine) for mine in gradients(2 * leaders)])
    simulated = Simulated(leaders, 8)
    expected = simulated.sum(brought[::2] + brought[1::2]) / (2 * leaders)
    for averages in averaged(every, gradients(2 * leaders)):
        np.testing.assert_allclose(flat(averages), expected, rtol=1e-5, atol=1e-5)
    for leader, owed in zip(every[::2], simulated.owed, strict=True):
        errors = flat([leader.state()[f"w{index}.error"].numpy() for index in range(4)])
        np.testing.assert_allclose(errors, owed[:ELEMENTS], rtol=1e-4, atol=1e-5)
    assert every[1].state()["w0.error"].numpy().any() == np.False_


def test_what_is_missing_or_of_another_size_starts_as_zero() -> None:
    (one, _) = methods(ranks_of(2))
    state = {"w1.error": paddle.ones([40]), "w2.error": paddle.ones([2]), "w0.sums": paddle.to_tensor([4, 5])}
    one.load_state(state)
    found = {name: np.unique(tensor.numpy()).tolist() for name, tensor in one.state().items()}
    assert found == {"w0.sums": [0], "w0.error": [0.0], "w1.error": [1.0], "w2.error": [0.0], "w3.error": [0.0]}
    one.load_state({"w3.error": paddle.ones([8, 11])})
    assert one.state()["w3.error"].tolist() == [1.0] * 88
    one.load_state({"w0.sums": paddle.to_tensor([6])})
    assert one.state()["w0.sums"].tolist() == [6]
    assert list(methods(ranks_of(2), feedback=False)[0].state()) == ["w0.sums"]


def test_each_communicator_exchanges_over_groups_of_its_own(backend: str) -> None:
    """Where gradients are dense and averagings alone are in few bits, the first communicator has links."""
    pairs = 2 * 3 if backend == "gloo" else 0
    for compression, linked in (("int8", 2), ("none", 1)):
        ranks = ranks_of(3)
        profile = Profile(compression=compression, nccl_comm_num=2, fuse_all_reduce_ops=False)
        plan = build_plan(GRADIENTS, Cluster.imagined(3, 1), profile)
        every = [QuantisedSums(rank, plan, make_allreduces(rank, 2, 0)) for rank in ranks]  # type: ignore[arg-type]
        assert all(len(rank.formed) == 2 + linked * pairs for rank in ranks)
        for communicator in range(linked):
            made = [sums.make(communicator, "w0", ELEMENTS, settings()).rounded for sums in every]
            _, sent = in_turn([one.sum([paddle.ones([ELEMENTS])]) for one in made])
            assert sent[-1].ranks == (0, 1, 2)
            gathers = [stage.collectives[0].group.id for stage in made[0]._all_to_all.gather(paddle.ones([4], "uint8"))]
            assert gathers == [communicator]


def idle(stages: int) -> Stages[None]:
    """A rank that has no part in an exchange: it is not asked to take part by those who use links."""
    yield from (quantised.Stage(more=True) for _ in range(stages))


@pytest.mark.parametrize("members", [[0, 2, 3], [1, 2, 3, 5], [0, 1, 2, 3, 4]])
def test_each_member_gets_what_the_others_sent_to_it_in_their_order(backend: str, members: list[int]) -> None:
    ranks = ranks_of(6)
    links = [make_all_to_all(rank, form(rank, members), members) for rank in ranks]  # type: ignore[arg-type]
    pairs = [pair for pair in combinations(members, 2) for _ in range(2)] if backend == "gloo" else []
    assert all([group.ranks for group in rank.formed] == [tuple(members), *pairs] for rank in ranks)
    exchanges = [
        links[rank].exchange([paddle.to_tensor([rank, other, 7], dtype="uint8") for other in members])
        if rank in members
        else idle(1)
        for rank in range(6)
    ]
    found, _ = in_turn(exchanges)
    for rank in members:
        assert [one.tolist() for one in found[rank]] == [[other, rank, 7] for other in members if other != rank]


def test_paddles_view_of_a_slice_in_another_dtype_reads_elsewhere() -> None:
    """Why parts are cut in their own dtype. If this fails, Paddle has mended it."""
    half = paddle._C_ops.slice(paddle.view(paddle.arange(8, dtype="float32"), "uint8"), [0], [16], [32], [1], [])
    assert half.numpy().view("float32").tolist() == [4, 5, 6, 7] != paddle.view(half, "float32").tolist()
