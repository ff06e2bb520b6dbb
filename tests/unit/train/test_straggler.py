"""A slow rank is named once, after it has been slow for a while, and once more when it keeps up again."""

from __future__ import annotations

from fleet_train.train.reporter import StragglerWatch

ENDPOINTS = ("10.0.0.1:6170", "10.0.0.1:6171", "10.0.0.2:6170", "10.0.0.2:6171")
SLOW = [100.0, 104.0, 98.0, 180.0]
WAITS = [80.0, 76.0, 82.0, 0.0]
EVEN = [100.0, 104.0, 98.0, 101.0]


def watch(factor: float = 1.5, intervals: int = 3) -> StragglerWatch:
    return StragglerWatch(ENDPOINTS, factor, intervals, seconds=0)


def test_it_is_named_with_its_share_of_the_waiting_once_per_change() -> None:
    watching = watch()
    said = [watching.check(SLOW, WAITS) for _ in range(5)]
    assert said == [
        None,
        None,
        "rank 3 (10.0.0.2:6171) takes 1.8x the median step of the others; they waited 44 % of their time for it",
        None,
        None,
    ]
    recovered = [watching.check(EVEN, WAITS) for _ in range(4)]
    assert recovered == [None, None, "rank 3 (10.0.0.2:6171) keeps up with the others again", None]


def test_many_short_intervals_are_not_enough() -> None:
    now = [0.0]
    watching = StragglerWatch(ENDPOINTS, 1.5, intervals=3, seconds=5.0, clock=lambda: now[0])
    said = []
    for _ in range(10):
        said.append(watching.check(SLOW, WAITS))
        now[0] += 0.9
    assert [message is not None for message in said].index(True) == 6  # 5.4 s after it was slow for the first time


def test_another_straggler_is_named_in_turn() -> None:
    watching = watch(intervals=1)
    assert "rank 3" in str(watching.check(SLOW, WAITS))
    assert "rank 0 (10.0.0.1:6170) takes 3.0x" in str(watching.check([300.0, 100.0, 100.0, 100.0], [0.0, 9, 9, 9]))


def test_one_slow_interval_is_nobodys_fault() -> None:
    watching = watch()
    assert {watching.check(step, WAITS) for step in (SLOW, EVEN, SLOW, SLOW, EVEN)} == {None}


def test_two_ranks_are_compared_with_each_other() -> None:
    assert "takes 2.0x" in str(watch(intervals=1).check([50.0, 100.0], [50.0, 0.0]))


def test_the_factor_decides_and_0_is_silence() -> None:
    assert watch(factor=2.0, intervals=1).check(SLOW, WAITS) is None
    assert watch(factor=0.0, intervals=1).check(SLOW, WAITS) is None


def test_nothing_is_said_of_one_rank_or_of_ranks_that_told_nothing() -> None:
    assert watch(intervals=1).check([100.0], [0.0]) is None
    assert watch(intervals=1).check([100.0, 0.0], [0.0, 0.0]) is None
