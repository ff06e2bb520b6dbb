"""Shards of different sizes: the number of steps, and the samples in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_train.data import OwnDataSampler, agree_steps
from fleet_train.errors import DataError


def test_truncate_takes_the_smallest_count_and_pad_the_largest() -> None:
    assert agree_steps([5, 3, 4], "truncate") == 3
    assert agree_steps([5, 3, 4], "pad") == 5
    assert agree_steps([5, 3, 4]) == 3


def test_error_takes_equal_counts_only_and_lists_them() -> None:
    assert agree_steps([4, 4], "error") == 4
    with pytest.raises(DataError, match=r"by rank: 5, 3; .* truncate \(3 steps for all\) or --uneven pad \(5 steps"):
        agree_steps([5, 3], "error")


@pytest.mark.parametrize("policy", ["truncate", "pad", "error"])
def test_a_rank_without_a_step_is_named(policy: str) -> None:
    with pytest.raises(DataError, match=r"by rank: 2, 0, 1, 0; rank\(s\) 1, 3 have too few samples"):
        agree_steps([2, 0, 1, 0], policy)


def test_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="--uneven 'join' is unknown; use one of truncate, pad, error"):
        agree_steps([1], "join")


def job(sizes: list[int], policy: str, **options: Any) -> list[OwnDataSampler]:
    """One rank per machine, machine i with sizes[i] samples of its own, steps agreed."""
    ranks = [OwnDataSampler(n, 2, total_ranks=len(sizes), policy=policy, **options) for n in sizes]
    for rank in ranks:
        rank.agree([one.proposed_steps for one in ranks])
    return ranks


def listed(sampler: OwnDataSampler) -> list[list[int]]:
    return [sampler.batch(step).tolist() for step in range(len(sampler))]


def test_truncated_ranks_read_whole_batches_of_their_own_samples() -> None:
    assert [listed(rank) for rank in job([7, 5], "truncate", shuffle=False)] == [
        [[0, 1], [2, 3]],
        [[0, 1], [2, 3]],
    ]


def test_padded_ranks_start_their_samples_again() -> None:
    assert [listed(rank) for rank in job([7, 3], "pad", shuffle=False)] == [
        [[0, 1], [2, 3], [4, 5], [6, 0]],
        [[0, 1], [2, 0], [1, 2], [0, 1]],
    ]


def test_what_truncate_leaves_out_changes_with_the_epoch() -> None:
    long, _ = job([9, 4], "truncate", seed=1)
    seen = set()
    for epoch in range(12):
        long.set_epoch(epoch)
        seen |= set(np.concatenate(listed(long)).tolist())
    assert seen == set(range(9))


def test_ranks_of_one_machine_share_its_shard() -> None:
    ranks = [OwnDataSampler(8, 2, rank, 2, total_ranks=3, shuffle=False) for rank in range(2)]
    alone = OwnDataSampler(4, 2, total_ranks=3, shuffle=False)
    counts = [*(rank.proposed_steps for rank in ranks), alone.proposed_steps]
    assert counts == [2, 2, 2]
    assert {rank.agree(counts) for rank in (*ranks, alone)} == {2}
    assert [listed(rank) for rank in ranks] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


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
        rank.agree([rank.proposed_steps] * 4)
        rank.set_epoch(0, consumed_samples=8)
    assert [listed(rank) for rank in two_each] == [[[4, 6], [8, 10]], [[5, 7], [9, 11]]]


def test_more_samples_consumed_than_agreed_is_refused() -> None:
    with pytest.raises(DataError, match="consumed_samples=13 of an epoch in which all ranks read 12 samples"):
        job([8, 6], "truncate")[0].set_epoch(0, 13)
