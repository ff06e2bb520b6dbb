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
        ([[1, 2], [1, 3], [1, 3], [1, 2]], "w1", [1, 2]),  # two against two: rank 0's are the usual ones
        ([[1, 2], [1, 3], [1, 4], [1, 5]], "w1", [1, 2, 3]),
    ],
)
def test_the_first_parameter_that_differs_and_the_ranks_in_the_minority_are_named(
    details: list[list[int]], name: str, odd: list[int]
) -> None:
    told = replica_check.explain_drift(job_of({}), "step 7", NAMES, dict(enumerate(details)))
    ranks = ", ".join(CLUSTER.describe(rank) for rank in odd)
    assert told.startswith(f"replicas have diverged at step 7: parameter '{name}' of {ranks} differs from the other")
    assert told.endswith("(divergence_check_steps)")


def test_equal_details_of_unequal_wholes_blame_no_rank() -> None:
    told = replica_check.explain_drift(job_of({}), "step 7", NAMES, {rank: [1, 2] for rank in range(4)})
    assert told == "replicas have diverged at step 7"


def test_equal_ranks_need_one_barrier_and_unequal_ones_send_their_digests() -> None:
    tensors = [paddle.to_tensor([1.0, 2.0]), paddle.to_tensor([[3]], dtype="int64")]
    mine = [zlib.crc32(np.array([1.0, 2.0], "<f4").tobytes()), zlib.crc32(np.array([3], "<i8").tobytes())]
    assert replica_check.digests(tensors) == mine
    whole = zlib.crc32(np.asarray(mine, np.int64).tobytes())
    equal = job_of(dict.fromkeys(range(4), mine))
    replica_check.compare(equal, "step 1", NAMES, tensors)
    assert equal.told == [("digest at step 1", whole)]
    unequal = job_of({0: mine, 1: mine, 2: mine, 3: [mine[0], 0]})
    with pytest.raises(ScheduleMismatch, match="parameter 'w1' of "):
        replica_check.compare(unequal, "step 2", NAMES, tensors)
    assert unequal.told == [("digest at step 2", whole), ("digests at step 2", mine)]
