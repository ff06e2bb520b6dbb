"""Which rank reads which sample: the cases that people check, as literal lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_train.data import ShardedBatchSampler, evaluation_batches
from fleet_train.errors import DataError


def batches(num_samples: int, batch_size: int, rank: int, world_size: int, **options: Any) -> list[list[int]]:
    sampler = ShardedBatchSampler(num_samples, batch_size, rank, world_size, **options)
    return [batch.tolist() for batch in sampler]


def test_one_process_reads_everything_in_order_without_shuffle() -> None:
    assert batches(8, 4, 0, 1, shuffle=False) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_two_ranks_share_eight_samples() -> None:
    assert batches(8, 4, 0, 2, shuffle=False) == [[0, 2, 4, 6]]
    assert batches(8, 4, 1, 2, shuffle=False) == [[1, 3, 5, 7]]


def test_six_samples_on_two_ranks_give_three_each() -> None:
    assert batches(6, 4, 0, 2, shuffle=False) == [[0, 2, 4]]
    assert batches(6, 4, 1, 2, shuffle=False) == [[1, 3, 5]]


def test_six_samples_on_two_ranks_with_drop_last_give_none() -> None:
    assert batches(6, 4, 0, 2, shuffle=False, drop_last=True) == []
    assert batches(6, 4, 1, 2, shuffle=False, drop_last=True) == []


def test_five_samples_on_two_ranks_are_padded_with_the_first_of_the_order() -> None:
    assert batches(5, 4, 0, 2, shuffle=False) == [[0, 2, 4]]
    assert batches(5, 4, 1, 2, shuffle=False) == [[1, 3, 0]]


def test_repeated_sample_changes_with_the_epoch() -> None:
    sampler = ShardedBatchSampler(5, 4, rank=1, world_size=2)
    repeated = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        repeated.append(int(sampler.batch(0)[-1]))
    assert repeated == [2, 1, 4, 3, 2, 0]


def test_ten_samples_leave_a_last_batch_of_one() -> None:
    assert batches(10, 4, 0, 2, shuffle=False) == [[0, 2, 4, 6], [8]]
    assert batches(10, 4, 1, 2, shuffle=False) == [[1, 3, 5, 7], [9]]


def test_drop_last_removes_the_batch_of_one() -> None:
    assert batches(10, 4, 0, 2, shuffle=False, drop_last=True) == [[0, 2, 4, 6]]
    assert batches(10, 4, 1, 2, shuffle=False, drop_last=True) == [[1, 3, 5, 7]]


def test_fewer_samples_than_ranks_still_give_every_rank_one() -> None:
    assert [batches(2, 4, rank, 5, shuffle=False) for rank in range(5)] == [[[0]], [[1]], [[0]], [[1]], [[0]]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [1, 5, 16, 17, 31, 97])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_have_equal_steps_of_equal_size(num_samples: int, world_size: int, drop_last: bool) -> None:
    sizes = [
        [len(batch) for batch in ShardedBatchSampler(num_samples, 4, rank, world_size, drop_last=drop_last)]
        for rank in range(world_size)
    ]
    assert all(size == sizes[0] for size in sizes)
    assert len(sizes[0]) == len(ShardedBatchSampler(num_samples, 4, 0, world_size, drop_last=drop_last))


@pytest.mark.parametrize("num_samples", [5, 16, 97])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sample_is_lost_and_at_most_the_padding_is_repeated(num_samples: int, world_size: int) -> None:
    seen = [
        int(i) for r in range(world_size) for batch in ShardedBatchSampler(num_samples, 4, r, world_size) for i in batch
    ]
    assert set(seen) == set(range(num_samples))
    assert len(seen) - num_samples == -num_samples % world_size


def test_without_set_epoch_every_pass_has_the_same_order() -> None:
    sampler = ShardedBatchSampler(16, 4, 0, 2)
    assert [b.tolist() for b in sampler] == [b.tolist() for b in sampler]


def test_set_epoch_reshuffles_and_the_same_seed_repeats_it() -> None:
    first, second = ShardedBatchSampler(64, 8, seed=3), ShardedBatchSampler(64, 8, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        assert [b.tolist() for b in first] == [b.tolist() for b in second]
        orders.append(np.concatenate(list(first)).tolist())
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


def test_epoch_one_of_seed_zero_is_not_epoch_zero_of_seed_one() -> None:
    first, second = ShardedBatchSampler(64, 64, seed=0), ShardedBatchSampler(64, 64, seed=1)
    first.set_epoch(1)
    assert first.batch(0).tolist() != second.batch(0).tolist()


def test_joint_batch_does_not_depend_on_the_number_of_ranks() -> None:
    alone = [set(batch.tolist()) for batch in ShardedBatchSampler(48, 12, 0, 1, seed=5)]
    ranks = [list(ShardedBatchSampler(48, 4, rank, 3, seed=5)) for rank in range(3)]
    joint = [set(np.concatenate(step).tolist()) for step in zip(*ranks, strict=True)]
    assert joint == alone


def test_a_step_can_be_read_by_its_number() -> None:
    sampler = ShardedBatchSampler(64, 8, 1, 2, seed=3)
    assert sampler.batch(2).tolist() == list(sampler)[2].tolist()
    with pytest.raises(IndexError, match="step 4 of an epoch with 4 steps"):
        sampler.batch(4)


def test_indices_are_int64() -> None:
    assert {batch.dtype for batch in ShardedBatchSampler(10, 4)} == {np.dtype(np.int64)}


def test_evaluation_reads_each_sample_once_on_uneven_shards() -> None:
    assert [b.tolist() for b in evaluation_batches(5, 2, 0, 2)] == [[0, 2], [4]]
    assert [b.tolist() for b in evaluation_batches(5, 2, 1, 2)] == [[1, 3]]


def test_evaluation_shard_may_be_empty() -> None:
    assert evaluation_batches(1, 2, 1, 2) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 0, 1), "num_samples=0"),
        ((8, 0, 0, 1), "batch_size=0"),
        ((8, 4, 2, 2), "rank=2 with world_size=2"),
    ],
)
def test_senseless_sizes_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ShardedBatchSampler(*arguments)
    with pytest.raises(DataError, match=message):
        evaluation_batches(*arguments)
