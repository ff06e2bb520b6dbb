"""How samples are dealt over ranks of unlike speed, and which shares follow from what the ranks compute."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_train.cluster.shares import Deal, bounded, dealt, measured_shares
from fleet_train.errors import DataError


@pytest.mark.parametrize(
    ("samples", "shares", "expected"),
    [
        (64, (3, 1), [48, 16]),
        (10, (1, 1, 1), [4, 3, 3]),
        (11, (1, 1, 1), [4, 4, 3]),
        (10, (0.5, 0.25, 0.25), [5, 3, 2]),
        (64, (1000, 1), [62, 2]),
        (64, (1, 1000, 1), [2, 60, 2]),
        (7, (1000, 1), [6, 1]),
        (2, (1000, 1), [1, 1]),
        (4, (9, 1, 1), [2, 1, 1]),
        (5, (1,), [5]),
    ],
)
def test_samples_are_dealt_in_proportion_and_each_rank_gets_some(
    samples: int, shares: tuple[float, ...], expected: list[int]
) -> None:
    assert dealt(samples, shares) == expected


@pytest.mark.parametrize("shares", [(), (1, 0), (1, -1), (1, float("nan")), (1, float("inf"))])
def test_shares_that_are_none_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="each rank needs a share above 0"):
        dealt(8, shares)


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(DataError, match="2 samples cannot be dealt over 3 ranks"):
        dealt(2, (1, 1, 1))


@pytest.mark.parametrize("seed", range(20))
def test_any_deal_is_whole_near_its_shares_and_larger_for_larger_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 9))
    shares, samples = rng.uniform(0.05, 5, ranks).tolist(), int(rng.integers(ranks, 500))
    numbers = dealt(samples, shares)
    assert sum(numbers) == samples
    assert min(numbers) >= 1
    if min(samples * share / sum(shares) for share in shares) >= 2:
        assert all(abs(n - samples * s / sum(shares)) < 1 for n, s in zip(numbers, shares, strict=True))
    order = np.argsort(shares)
    assert (np.diff(np.array(numbers)[order]) >= 0).all()


@pytest.mark.parametrize(
    ("shares", "most", "expected"),
    [
        ((3, 1), (1, 1), [0.75, 0.25]),
        ((3, 1), (0.6, 1), [0.6, 0.4]),
        ((8, 1, 1), (0.5, 1, 1), [0.5, 0.25, 0.25]),
        ((8, 1, 1), (0.5, 0.2, 1), [0.5, 0.2, 0.3]),  # what one may not have goes on to the next
        ((1, 1), (0.5, 0.5), [0.5, 0.5]),
        ((1, 1, 1), (0.7, 0.2, 0.1), [0.7, 0.2, 0.1]),
    ],
)
def test_what_is_above_a_bound_is_divided_over_the_others(
    shares: tuple[float, ...], most: tuple[float, ...], expected: list[float]
) -> None:
    assert bounded(shares, most) == pytest.approx(expected)


def test_bounds_that_leave_a_part_to_nobody_are_refused() -> None:
    with pytest.raises(DataError, match=r"max_share: \[0.25, 0.5\] leaves 25% of the joint batch to no rank"):
        bounded((1, 1), [0.25, 0.5])


FREE = (1.0, 1.0)


def test_shares_follow_what_ranks_compute_and_stay_where_little_is_to_be_gained() -> None:
    assert measured_shares((8, 8), (100, 400), FREE) == pytest.approx([0.8, 0.2])
    assert measured_shares((80, 20), (160, 160), FREE) is None
    assert measured_shares((80, 20), (158, 163), FREE) is None, "less than 3 % of a step"
    assert measured_shares((8, 8), (0, 400), FREE) is None, "a rank has no step to tell of"
    assert measured_shares((8, 8), (100, 400), (0.7, 1)) == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("fixed_ms", [0.0, 30.0])
@pytest.mark.parametrize("speeds", [(4.0, 1.0), (2.0, 2.0, 1.0), (1.0, 8.0, 3.0)])
def test_repeated_measurements_make_all_ranks_equally_long(speeds: tuple[float, ...], fixed_ms: float) -> None:
    shares = [1 / len(speeds)] * len(speeds)
    for _ in range(6):
        numbers = dealt(1000, shares)
        times = [fixed_ms + number / speed for number, speed in zip(numbers, speeds, strict=True)]
        shares = measured_shares(numbers, times, [1.0] * len(speeds)) or shares
    assert sum(shares) == pytest.approx(1)
    assert max(times) / min(times) < 1.05


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0), (5.0, 1.0, 1.0)])
def test_each_place_is_dealt_once_in_steps_that_do_not_depend_on_the_shares(
    shares: tuple[float, ...], drops: bool, merges: bool
) -> None:
    ranks = len(shares)
    for left in range(ranks, 80):
        deal = Deal(left, 8 * ranks, shares, merges, drops)
        assert len(deal) == len(Deal(left, 8 * ranks, (1.0,) * ranks, merges, drops))
        parts = [[list(deal.part(step, rank)) for rank in range(ranks)] for step in range(len(deal))]
        places = [place for step in parts for part in step for place in part]
        whole = left - left % (8 * ranks) if drops else max(left, 8 * ranks * (len(deal) - 1) + ranks)
        assert places == list(range(whole)), (left, parts)
        least = 1 if not merges else 2
        if left >= 8 * ranks:
            assert min(len(part) for step in parts for part in step) >= least, (left, parts)
