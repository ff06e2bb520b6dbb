"""The divergence sentinel: which parameter of which rank differs from the others'."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives import replica_check
from fleet_train.convert import saving
from fleet_train.convert.program_state import OPTIMIZER, PARAMETER, PASS, ProgramState
from fleet_train.errors import ScheduleMismatch

CLUSTER = Cluster.imagined(4, 1)
NAMES = ["w0", "w1"]


def job_of(details: dict[int, list[int]], world_size: int = 4) -> Any:
    """A job whose ranks bring these digests; this one is rank 0."""
    told: list[tuple[str, Any]] = []

    def compare(name: str, value: Any) -> list[Any]:
        told.append((name, value))
        wholes = {zlib.crc32(np.asarray(one, np.int64).tobytes()) for one in details.values()}
        return [] if len(wholes) == 1 else [([(0, 0)], value)]

    def all_gather(name: str, value: Any) -> dict[int, Any]:
        told.append((name, value))
        return details

    return SimpleNamespace(cluster=CLUSTER, world_size=world_size, compare=compare, all_gather=all_gather, told=told)


@pytest.mark.parametrize(
    ("details", "name", "odd"),
    [
        ([[1, 2], [1, 2], [1, 3], [1, 2]], "w1", [2]),
        ([[5, 2], [1, 2], [1, 2], [1, 2]], "w0", [0]),
        ([[1, 2], [1, 3], [4, 2], [1, 2]], "w0", [2]),  # the first parameter that differs
        ([[1, 3], [1, 2], [1, 2]], "w1", [0]),
        ([[1], [2], [1], [3], [1]], "w0", [1, 3]),
    ],
)
def test_the_first_parameter_that_differs_and_the_ranks_outside_the_majority_are_named(
    details: list[list[int]], name: str, odd: list[int]
) -> None:
    ranks = len(details)
    told = replica_check.explain_drift(job_of({}, ranks), "step 7", NAMES, dict(enumerate(details)))
    whose = ", ".join(CLUSTER.describe(rank) for rank in odd)
    others = f"differs from that of the other {ranks - len(odd)} ranks, which agree. "
    assert told.startswith(f"replicas have diverged at step 7: '{name}' of {whose} {others}")
    assert told.endswith("(divergence_check_steps)")


def test_of_two_ranks_none_is_named_as_the_changed_one() -> None:
    told = replica_check.explain_drift(job_of({}, 2), "step 7", NAMES, {0: [1, 2], 1: [1, 3]})
    both = f"{CLUSTER.describe(0)} and {CLUSTER.describe(1)}"
    assert f"'w1' differs between {both}: one of the two was changed, and which one cannot be told. " in told


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([2, 3, 3, 2], "has 2 different values, and none of them on more than half of the 4 ranks"),
        ([2, 3, 3, 2], "cannot be told (ranks 0+3, ranks 1+2). "),
        ([2, 3, 4, 2], "cannot be told (ranks 0+3, rank 1, rank 2). "),  # the most frequent, but not a majority
        ([2, 3, 4], "has 3 different values, and none of them on more than half of the 3 ranks"),
        ([*range(9), 8], "rank 6, rank 7, ...). "),
        ([*[1] * 9, *[2] * 9], "(ranks 0+1+2+3+4+5+6+7+..., ranks 9+"),
    ],
)
def test_without_a_majority_that_is_said(values: list[int], told: str) -> None:
    found = {rank: [value] for rank, value in enumerate(values)}
    assert told in replica_check.explain_drift(job_of({}, len(values)), "step 7", NAMES, found)


def test_equal_details_of_unequal_wholes_blame_no_rank() -> None:
    told = replica_check.explain_drift(job_of({}), "step 7", NAMES, {rank: [1, 2] for rank in range(4)})
    assert told == "replicas have diverged at step 7"


def test_equal_ranks_need_one_barrier_and_unequal_ones_send_their_digests() -> None:
    tensors = [paddle.to_tensor([1.0, 2.0]), paddle.to_tensor([[3]], dtype="int64")]
    mine = [zlib.crc32(np.array([1.0, 2.0], "<f4").tobytes()), zlib.crc32(np.array([3], "<i8").tobytes())]
    assert replica_check.digests(tensor.numpy() for tensor in tensors) == mine
    whole = zlib.crc32(np.asarray(mine, np.int64).tobytes())
    equal = job_of(dict.fromkeys(range(4), mine))
    replica_check.compare(equal, "step 1", NAMES, tensors)
    assert equal.told == [("digest at step 1", whole)]
    unequal = job_of({0: mine, 1: mine, 2: mine, 3: [mine[0], 0]})
    with pytest.raises(ScheduleMismatch, match="'w1' of ") as raised:
        replica_check.compare(unequal, "step 2", NAMES, tensors)
    assert raised.value.failed_rank == 3
    assert unequal.told == [("digest at step 2", whole), ("digests at step 2", mine)]


KINDS = {
    "w": PARAMETER,
    "w_1": PARAMETER,
    "mean": PARAMETER,  # of a batch norm
    "w_moment1_0": OPTIMIZER,
    "w_1_moment1_0": OPTIMIZER,
    "w@average": PASS,
    "w@gradient_merge": PASS,  # each rank's own
    "seen_by_this_rank": OPTIMIZER,  # a script's own value
    "loss_scaling_0": PASS,
}


@pytest.mark.parametrize(
    ("every", "averager", "with_optimizer", "expected"),
    [
        (100, None, True, ["w", "w_1", "w_moment1_0", "w_1_moment1_0", "w@average"]),
        (100, None, False, ["w", "w_1"]),
        (100, "in local steps", True, ["w", "w_1"]),
        (100, "before them", True, ["w", "w_1", "w_moment1_0", "w_1_moment1_0", "w@average"]),
        (0, None, True, None),
    ],
)
def test_before_a_save_what_the_ranks_must_hold_alike_is_compared(
    monkeypatch: pytest.MonkeyPatch, every: int, averager: str | None, with_optimizer: bool, expected: list[str] | None
) -> None:
    told: list[Any] = []
    values = {name: np.full(2, number, "float32") for number, name in enumerate(KINDS)}
    monkeypatch.setattr(saving, "borrowed", lambda variable: variable)
    state = ProgramState.__new__(ProgramState)
    state.kinds, state.variables = KINDS, values
    schedule = SimpleNamespace(is_synchronous=lambda _: averager == "before them")
    exchange: Any = SimpleNamespace(
        trained=["w", "w_1"],
        averager=averager and SimpleNamespace(schedule=schedule),
        step=8,
        check=SimpleNamespace(is_asked_for=every > 0),
        compare_saved=lambda names, digests: told.append((names, digests)),
    )
    saving.compare_replicas(state, exchange, with_optimizer)
    assert told == ([] if expected is None else [(expected, [zlib.crc32(values[name].data) for name in expected])])


def test_values_that_rank_0_has_copied_for_the_save_are_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(saving, "borrowed", lambda name: pytest.fail(f"{name} was copied again"))
    state = ProgramState.__new__(ProgramState)
    state.kinds, state.variables = KINDS, {name: name for name in KINDS}
    exchange: Any = SimpleNamespace(
        trained=["w", "w_1"],
        averager=None,
        check=SimpleNamespace(is_asked_for=True),
        compare_saved=lambda *what: told.append(what),
    )
    copies = {name: np.full(2, number, "float32") for number, name in enumerate(KINDS)}
    saving.compare_replicas(state, exchange, True, copies)
    names = ["w", "w_1", "w_moment1_0", "w_1_moment1_0", "w@average"]
    assert told == [(names, [zlib.crc32(copies[name].data) for name in names])]
