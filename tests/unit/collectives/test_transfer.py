"""Arrays between the ranks, as rank 0 of two that bring the same sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fleet_train.cluster.store.client import Variants
from fleet_train.collectives.job import transfer
from fleet_train.errors import ScheduleMismatch
from tests.unit.collectives.one_of_two import OneOfTwo, one_of_two

ARRAYS = {
    "matrix": np.arange(6, dtype="float32").reshape(2, 3).T,  # not contiguous
    "number": np.array(7, "int64"),
    "nothing": np.empty((0, 4), "float16"),
    "flags": np.array([True, False, True]),
}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    with one_of_two(monkeypatch) as made:
        yield made


def assert_same(found: transfer.Arrays) -> None:
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("piece_bytes", [16, 18, 1 << 20])
def test_rank_0_has_its_own_part_and_the_others_whatever_the_pieces(
    job: OneOfTwo, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "_PIECE_BYTES", piece_bytes)
    parts = transfer.gather_arrays(job, ARRAYS)
    assert len(parts) == 2
    for part in parts:
        assert_same(part)
    assert not np.shares_memory(parts[0]["flags"], parts[1]["flags"])


def test_rank_0_gives_away_what_it_has(job: OneOfTwo) -> None:
    assert_same(transfer.broadcast_arrays(job, ARRAYS))
    assert_same(transfer.scatter_arrays(job, [ARRAYS, ARRAYS]))


def test_no_part_is_collected_of_ranks_with_other_shapes(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, Any]] = []

    def compare(name: str, value: Any) -> Variants:
        told.append((name, value))
        return [([(0, 0)], value), ([(1, 1)], [["w", [2], "<f4"]])]

    monkeypatch.setattr(job, "compare", compare)
    with pytest.raises(ScheduleMismatch) as caught:
        transfer.gather_arrays(job, {"w": np.zeros((3, 1), "float32")})
    assert told == [("collect 0", [["w", [3, 1], "<f4"]])]
    assert str(caught.value) == (
        f"{job.cluster.describe(0)} and {job.cluster.describe(1)} have different state of their own to save: "
        "[['w', [3, 1], '<f4']] and [['w', [2], '<f4']]"
    )


def test_each_call_meets_under_a_name_of_its_own(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(job, "met", names.append)
    for _ in range(2):
        transfer.broadcast_arrays(job, {})
        transfer.gather_arrays(job, {})
        transfer.scatter_arrays(job, [{}, {}])
    assert names == ["share 0", "collect 0", "hand out 0", "share 1", "collect 1", "hand out 1"]
