"""Which rank reads which sample, in how many steps, also with shards of different sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from fleet_train.data import OwnDataSampler, ShardedBatchSampler, agree_steps, evaluation_batches
from fleet_train.errors import DataError

# Batches of two samples by rank and step: 8 samples, 2 ranks, seed 0, epochs 0, 1 and 2.
FIRST_ORDER = [[[2, 3], [5, 1]], [[4, 6], [0, 7]]]
SECOND_ORDER = [[[1, 7], [0, 2]], [[3, 6], [4, 5]]]
THIRD_ORDER = [[[5, 6], [7, 4]], [[2, 0], [1, 3]]]


def batches(num_samples: int, batch_size: int, rank: int, world_size: int, **options: Any) -> list[list[int]]:
    sampler = ShardedBatchSampler(num_samples, batch_size, rank, world_size, **options)
    return [batch.tolist() for batch in sampler]


@pytest.mark.parametrize(
    ("num_samples", "world_size", "options", "expected"),
    [
        (8, 2, {}, [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]),
        (6, 2, {}, [[[0, 2, 4]], [[1, 3, 5]]]),
        (6, 2, {"drop_last": True}, [[], []]),
        (5, 2, {}, [[[0, 2, 4]], [[1, 3, 0]]]),  # padded with the first of the order
        (10, 2, {}, [[[0, 2, 4, 6], [8]], [[1, 3, 5, 7], [9]]]),
        (10, 2, {"drop_last": True}, [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]),
        (10, 2, {"last_batch": "merge"}, [[[0, 2, 4, 6, 8]], [[1, 3, 5, 7, 9]]]),
        (9, 1, {"last_batch": "merge"}, [[[0, 1, 2, 3], [4, 5, 6, 7, 8]]]),
        (10, 1, {"last_batch": "merge"}, [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]),
        (1, 1, {"last_batch": "merge"}, [[[0]]]),
        (1, 1, {"last_batch": "refuse"}, [[[0]]]),
        (8, 1, {"last_batch": "refuse"}, [[[0, 1, 2, 3], [4, 5, 6, 7]]]),
        (5, 2, {"last_batch": "exact"}, [[[0, 2, 4]], [[1, 3]]]),
        (9, 2, {"last_batch": "exact"}, [[[0, 2, 4, 6, 8]], [[1, 3, 5, 7]]]),
        (10, 2, {"last_batch": "exact"}, [[[0, 2, 4, 6, 8]], [[1, 3, 5, 7, 9]]]),
        (11, 2, {"last_batch": "exact"}, [[[0, 2, 4, 6], [8, 10]], [[1, 3, 5, 7], [9]]]),
        (2, 3, {"last_batch": "exact"}, [[[0]], [[1]], [[0]]]),  # no rank is without a sample
        (2, 5, {}, [[[0]], [[1]], [[0]], [[1]], [[0]]]),
    ],
)
def test_batches_of_four_by_rank(num_samples: int, world_size: int, options: Any, expected: list[Any]) -> None:
    found = [batches(num_samples, 4, rank, world_size, shuffle=False, **options) for rank in range(world_size)]
    assert found == expected


@pytest.mark.parametrize(
    "passes", [[(None, FIRST_ORDER)] * 2, list(enumerate((FIRST_ORDER, SECOND_ORDER, THIRD_ORDER)))]
)
def test_set_epoch_alone_changes_the_order_of_eight_samples(passes: list[tuple[int | None, Any]]) -> None:
    ranks = [ShardedBatchSampler(8, 2, rank, 2, seed=0) for rank in range(2)]
    for epoch, expected in (*passes, passes[0]):
        for rank in ranks:
            if epoch is not None:
                rank.set_epoch(epoch)
        assert [[batch.tolist() for batch in rank] for rank in ranks] == expected


def test_batch_of_one_is_refused_and_batch_norm_is_named() -> None:
    message = (
        "10 samples on 2 rank.s. with batch_size=4 leave a last batch of 1 sample per rank, .*; use last_batch='me"
    )
    with pytest.raises(DataError, match=message):
        ShardedBatchSampler(10, 4, 0, 2, last_batch="refuse")


def joint_steps(sampler: dict[str, Any], world_size: int, epoch: int, consumed: int) -> tuple[list[list[int]], int]:
    """The joint batch of each step left, in the global order, and what is consumed after the last one."""
    ranks = [ShardedBatchSampler(rank=rank, world_size=world_size, **sampler) for rank in range(world_size)]
    for rank in ranks:
        rank.set_epoch(epoch, consumed)
    steps = [
        [int(sample) for dealt in zip_longest(*batches) for sample in dealt if sample is not None]
        for batches in zip(*ranks, strict=True)
    ]
    after = {rank.consumed_after(len(rank)) for rank in ranks}
    assert len(after) == 1
    return steps, after.pop()


@pytest.mark.parametrize("last_batch", ["keep", "merge", "exact"])
@pytest.mark.parametrize("num_samples", [1, 5, 16, 23, 48, 97])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_an_epoch_resumed_at_any_step_on_any_ranks_loses_and_repeats_nothing(
    num_samples: int, before: int, last_batch: str
) -> None:
    sampler = {"num_samples": num_samples, "batch_size": 4, "seed": 3, "last_batch": last_batch}
    whole, _ = joint_steps(sampler, before, epoch=2, consumed=0)
    order = joint_steps({**sampler, "batch_size": num_samples}, 1, epoch=2, consumed=0)[0][0]
    first = ShardedBatchSampler(rank=0, world_size=before, **sampler)
    first.set_epoch(2)
    for steps_done in range(len(whole) + 1):
        consumed = first.consumed_after(steps_done)
        done = [sample for step in whole[:steps_done] for sample in step][:consumed]
        for after in (1, 2, 3, 5):
            rest, end = joint_steps(sampler, after, epoch=2, consumed=consumed)
            assert after != before or rest == whole[steps_done:]
            seen = done + [sample for step in rest for sample in step]
            assert seen[:num_samples] == order
            assert len(seen) - num_samples < max(before, after)  # only padding, at the very end
            assert end == num_samples


def test_drop_last_resumed_equals_an_undisturbed_epoch_or_drops_at_most_one_joint_batch_on_other_ranks() -> None:
    sampler = {"num_samples": 97, "batch_size": 4, "seed": 3, "drop_last": True}
    whole, _ = joint_steps(sampler, 3, epoch=0, consumed=0)
    assert joint_steps(sampler, 3, epoch=0, consumed=36)[0] == whole[3:]
    rest, end = joint_steps(sampler, 2, epoch=0, consumed=36)
    assert [len(step) for step in rest] == [8] * 7
    assert end == 36 + 56


def test_epoch_one_of_seed_zero_is_not_epoch_zero_of_seed_one_and_a_step_can_be_read_by_its_number() -> None:
    first, second = ShardedBatchSampler(64, 8, seed=0), ShardedBatchSampler(64, 8, seed=1)
    first.set_epoch(1)
    assert first.batch(0).tolist() != second.batch(0).tolist()
    read = list(second)
    assert (read[2].tolist(), read[2].dtype, len(read)) == (second.batch(2).tolist(), np.int64, 8)
    with pytest.raises(IndexError, match="step 8 of an epoch with 8 steps"):
        second.batch(8)


def test_evaluation_reads_each_sample_once_on_uneven_shards_of_which_one_may_be_empty() -> None:
    assert [b.tolist() for b in evaluation_batches(5, 2, 0, 2)] == [[0, 2], [4]]
    assert [b.tolist() for b in evaluation_batches(5, 2, 1, 2)] == [[1, 3]]
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


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (
            lambda: ShardedBatchSampler(8, 4, drop_last=True, last_batch="exact"),
            "'exact' reads every sample, and drop_last",
        ),
        (
            lambda: ShardedBatchSampler(8, 4, last_batch="pad"),
            "last_batch='pad'; use one of keep, merge, refuse, exact",
        ),
        (
            lambda: ShardedBatchSampler(10, 4).set_epoch(1, consumed_samples=11),
            "consumed_samples=11 of an epoch with 10 samples; has the data changed",
        ),
        (
            lambda: job([8, 6], "truncate")[0].set_epoch(0, 13),
            "consumed_samples=13 of an epoch in which all ranks read 12 samples",
        ),
        (lambda: agree_steps([1], "join"), "--uneven 'join' is unknown; use one of truncate, pad, error"),
        (
            lambda: agree_steps([5, 3], "error"),
            r"by rank: 5, 3; .* truncate \(3 steps for all\) or --uneven pad \(5 steps",
        ),
        (lambda: agree_steps([2, 0, 1, 0], "pad"), r"by rank: 2, 0, 1, 0; rank\(s\) 1, 3 have too few samples"),
    ],
)
def test_what_cannot_be_read_is_refused(do: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        do()


def test_truncate_takes_the_smallest_count_and_pad_the_largest() -> None:
    assert [agree_steps([5, 3, 4]), agree_steps([5, 3, 4], "pad"), agree_steps([4, 4], "error")] == [3, 5, 4]


def job(sizes: list[int], policy: str, **options: Any) -> list[OwnDataSampler]:
    """One rank per machine, machine i with sizes[i] samples of its own, steps agreed."""
    ranks = [OwnDataSampler(n, 2, total_ranks=len(sizes), policy=policy, **options) for n in sizes]
    for rank in ranks:
        rank.agree([one.proposed_steps for one in ranks])
    return ranks


def listed(sampler: OwnDataSampler) -> list[list[int]]:
    return [sampler.batch(step).tolist() for step in range(len(sampler))]


def test_what_truncate_leaves_out_changes_with_the_epoch() -> None:
    long, _ = job([9, 4], "truncate", seed=1)
    seen = set()
    for epoch in range(12):
        long.set_epoch(epoch)
        seen |= set(np.concatenate(listed(long)).tolist())
    assert seen == set(range(9))


@pytest.mark.parametrize("policy", ["truncate", "pad"])
def test_a_resume_in_the_middle_of_an_epoch_equals_an_undisturbed_run(policy: str) -> None:
    ranks = job([11, 8, 6], policy, seed=4)
    for rank in ranks:
        rank.set_epoch(5)
    whole = [listed(rank) for rank in ranks]
    for done in range(len(ranks[0]) + 1):
        consumed = ranks[0].consumed_after(done)
        again = job([11, 8, 6], policy, seed=4)
        for rank in again:
            rank.set_epoch(5, consumed)
        assert [listed(rank) for rank in again] == [batches[done:] for batches in whole]
        assert again[0].consumed_after(len(again[0])) == 6 * len(whole[0])


def test_with_one_more_rank_per_machine_each_machine_continues_its_shard() -> None:
    one_each = job([12, 12], "truncate", shuffle=False)[0]
    assert one_each.consumed_after(2) == 8
    two_each = [OwnDataSampler(12, 2, rank, 2, total_ranks=4, shuffle=False) for rank in range(2)]
    for rank in two_each:
        assert rank.agree([rank.proposed_steps] * 4) == rank.proposed_steps == 3
        rank.set_epoch(0, consumed_samples=8)
    assert [listed(rank) for rank in two_each] == [[[4, 6], [8, 10]], [[5, 7], [9, 11]]]


def test_truncated_ranks_read_whole_batches_of_their_own_samples_and_padded_ones_start_them_again() -> None:
    truncated, padded = job([7, 5], "truncate", shuffle=False), job([7, 3], "pad", shuffle=False)
    assert [listed(rank) for rank in truncated] == [[[0, 1], [2, 3]]] * 2
    assert [listed(rank) for rank in padded] == [
        [[0, 1], [2, 3], [4, 5], [6, 0]],
        [[0, 1], [2, 0], [1, 2], [0, 1]],
    ]
