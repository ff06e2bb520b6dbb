"""Arrays between ranks: as rank 0 of two that send the same, and as the last of three."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.cluster.store.client import Variants
from fleet_train.collectives import transfer
from fleet_train.collectives.engine import HAND_OVER
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


def test_each_call_has_a_barrier_with_its_own_name(job: OneOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(job, "met", names.append)
    for _ in range(2):
        transfer.broadcast_arrays(job, {})
        transfer.gather_arrays(job, {})
        transfer.scatter_arrays(job, [{}, {}])
    assert names == ["share 0", "collect 0", "hand out 0", "share 1", "collect 1", "hand out 1"]


class Other:
    """The last of three ranks, beside a rank 0 that has sent ``wire`` already, piece by piece."""

    world_size, timeout_seconds = 3, 60.0

    def __init__(self, described: Any, wire: bytes) -> None:
        self.cluster = Cluster(Cluster.imagined(3, 1).ranks, 2)
        self.place = paddle.CPUPlace()
        self.engine = SimpleNamespace(start=self._start)
        self.described, self.wire = described, wire
        self.did: list[tuple[str, int, int, Any]] = []
        self.told: list[tuple[str, Any]] = []

    def count(self, name: str) -> int:
        del name
        return 7

    def broadcast(self, name: str, value: Any) -> Any:
        self.told.append((name, value))
        return self.described

    def compare(self, name: str, value: Any) -> Variants:
        self.told.append((name, value))
        return []

    def communicators(self, number: int) -> list[str]:
        return ["group"][:number]

    def _start(self, stages: Any, place: Any) -> Any:
        assert next(stages) is HAND_OVER
        (collective,) = next(stages).collectives
        tensor = collective.tensor
        if collective.kind != "gather":
            mine, self.wire = self.wire[: tensor.size], self.wire[tensor.size :]
            paddle.assign(paddle.to_tensor(np.frombuffer(mine, "uint8")), output=tensor)
        self.did.append((collective.kind, collective.root, tensor.size, collective.parts))
        assert (collective.group, place.timeout_seconds) == ("group", 60.0)
        return SimpleNamespace(result=lambda: list(stages))


DESCRIBED = [["w", [2, 3], "<f4"], ["none", [0, 4], "<f2"], ["n", [], "<i8"]]
SENT = {
    "w": np.arange(6, dtype="float32").reshape(2, 3),
    "none": np.empty((0, 4), "float16"),
    "n": np.array(9, "int64"),
}
WIRE = b"".join(array.tobytes() for array in SENT.values())


def assert_sent(found: transfer.Arrays) -> None:
    assert list(found) == list(SENT)
    for name, array in SENT.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(("piece_bytes", "pieces"), [(16, [16, 8, 8]), (1 << 20, [24, 8])])
def test_other_ranks_get_what_rank_0_shares_whatever_they_bring(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, pieces: list[int]
) -> None:
    monkeypatch.setattr(transfer, "_PIECE_BYTES", piece_bytes)
    job: Any = Other(DESCRIBED, WIRE)
    assert_sent(transfer.broadcast_arrays(job, {"something else": np.ones(3)}))
    assert job.did == [("broadcast", 0, size, None) for size in pieces]
    assert job.told == [("share 7", None)]


@pytest.mark.parametrize(("piece_bytes", "pieces"), [(48, [16, 8, 8]), (1 << 20, [24, 8])])
def test_other_ranks_get_their_part_of_what_rank_0_hands_out(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, pieces: list[int]
) -> None:
    """A piece is for all three ranks: rank 0 sends as many bytes at a time as it is allowed."""
    monkeypatch.setattr(transfer, "_PIECE_BYTES", piece_bytes)
    job: Any = Other(DESCRIBED, WIRE)
    assert_sent(transfer.scatter_arrays(job, []))
    assert job.did == [("scatter", 0, size, None) for size in pieces]
    assert job.told == [("hand out 7", None)]


def test_other_ranks_bring_theirs_and_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PIECE_BYTES", 48)
    job: Any = Other(None, b"")
    assert transfer.gather_arrays(job, SENT) == []
    assert job.did == [("gather", 0, size, None) for size in (16, 8, 8)]
    assert job.told == [("collect 7", DESCRIBED)]


def test_one_process_shares_with_itself() -> None:
    job: Any = SimpleNamespace(world_size=1)
    found = transfer.broadcast_arrays(job, SENT)
    assert_sent(found)
    assert found is not SENT
